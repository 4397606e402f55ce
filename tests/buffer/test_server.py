"""The controller's decisions with events in a fixed order: leases, served groups, batches that are set aside, drained
runs, and the tree by which actors hand weights on."""

import math
import random
import time
from collections import Counter
from contextlib import nullcontext

import pytest

from areal_like.config.run_config import load
from areal_like.run.process import EXIT_STOPPED
from areal_like.run.samples import read
from areal_like.wire.link import BusError
from buffer.entries import LEASED, Stage
from buffer.events import LeaveOut
from buffer.fleet import RelayTree
from buffer.kept_samples import KeptSamples
from buffer.peers import MOST_FAILED
from buffer.policies import fifo, in_order, none, zero_variance
from buffer.rounds import SyncScheduler
from buffer.schedulers import AsyncScheduler
from buffer.sizing import Fixed, Sagc
from tests.buffer.house import SIGN_OF_LIFE, B, House, asynchronous


@pytest.mark.parametrize("scheduler", [asynchronous(max_staleness=0), SyncScheduler(Fixed(group_size=8))])
def test_the_first_actor_with_new_weights_leaves_the_others_their_share(scheduler) -> None:
    house = House(scheduler).start()
    assert len(house.leases("actor-0")) == len(house.leases("actor-1")) == B // 2
    for name in house.names:
        for group_id in house.leases(name):
            house.push(name, group_id, 0)
    house.want(0)
    assert house.batches() == [[0, 1, 2, 3]]
    house.say("learner", "trained", {"index": 0})
    house.publish(1)
    assert len(house.leases()) == B, "nothing may start on old weights"
    house.apply(1, "actor-0")
    assert len(house.leases()) == B + B // 2
    house.apply(1, "actor-1")
    assert len(house.leases()) == 2 * B


@pytest.mark.parametrize("fate", ["failed", "filtered"])
def test_a_group_that_leaves_untrained_gives_its_slot_to_the_next_prompt(fate: str, tmp_path) -> None:
    house = House(asynchronous(max_staleness=0), group_filter=zero_variance if fate == "filtered" else none).start()
    house.server.samples = KeptSamples(tmp_path, load(["base"]).run)
    if fate == "filtered":
        house.finish(0, 0)
        assert house.router.sent[-1] == ("actor-0", "pushed", {"ids": [0]})
        house.server.groups.group_filter = none
    else:
        house.say("actor-0", "failed", {"id": 0, "reason": "rejected", "detail": "why"})
    kept, filtered = next(read(tmp_path, ["dropped"])), fate == "filtered"
    why = "filtered: zero variance" if filtered else "rejected: why"
    assert (kept.group, kept.why, kept.actor, bool(kept.tokens)) == (0, why, "actor-0", filtered)
    assert sorted(house.leases()) == [0, 1, 2, 3, 4] and house.store.bytes == 0
    for group_id in (1, 2, 3, 4):
        house.finish(group_id, 0)
    house.want(0)
    assert house.batches() == [[4, 1, 2, 3]], "group 4 stands in slot 0"
    ledger = house.store.ledger()
    assert {**ledger["dropped"], **ledger["filtered"]} == {"rejected" if fate == "failed" else "zero variance": 1}


def test_a_run_whose_groups_are_all_left_out_shows_the_reason_until_it_makes_a_step(caplog) -> None:
    house = House(asynchronous(max_staleness=0), group_filter=zero_variance).start()
    house.want(0)
    for group_id in range(16 * B):
        house.finish(group_id, 0)
    found = [line for line in house.server.status.waits() if "zero variance" in line]
    assert len(found) == 1 and "64 filtered: zero variance" in found[0] and "see filter" in found[0]
    assert sum("zero variance" in line for line in caplog.messages) == 2, "at 8 and 16 batches"
    house.server.groups.group_filter = none
    for group_id in range(16 * B, 17 * B):
        house.finish(group_id, 0)
    house.trained(0)
    assert not any("zero variance" in line for line in house.server.status.waits())


def test_samples_that_were_cut_are_written_down() -> None:
    house = House(AsyncScheduler(Sagc(candidates=(4, 8)), max_staleness=1, oversample_responses=1.25))
    records = []
    house.server.groups.record = lambda event, payload: records.append(event) or payload
    house.start()
    name = next(name for name in house.names if 0 in house.leases(name))
    house.say(name, "left_out", {"id": 0, "cut": [70, 90], "redrawn": ["reward crashed: no"]})
    house.push(name, 0, 0)
    assert LeaveOut(0, (70, 90), ["reward crashed: no"]) in records
    (seen,) = house.server.gauges.seen
    assert seen.tokens == (2,) * 8 and not any(seen.cut), "the group did not wait for the others"


def test_each_batch_reports_all_tokens_so_far() -> None:
    house = House(asynchronous(max_staleness=2)).start()
    house.server.peers.clock = lambda: 1.0  # both batches come at the same time
    for batch in range(2):
        for group_id in range(B * batch, B * (batch + 1)):
            house.finish(group_id, 0)
        house.want(batch)
    infos = [body["info"] for _, kind, body in house.router.sent if kind == "batch"]
    assert [info["rollout/tokens"] for info in infos] == [B * 16, 2 * B * 16]


def test_the_limit_of_the_start_does_not_run_while_an_engine_starts() -> None:
    """Engines have time limits of their own: a large model may start more slowly than the processes connect."""
    house = House(asynchronous(max_staleness=0))
    house.server.presence.ready_timeout = -1.0
    house.server.presence._born = math.inf
    house.hello("learner", *house.names)
    words = {"engine": "starting", "engine_note": "its SGLang server is starting"}
    house.say("actor-1", "heartbeat", SIGN_OF_LIFE | {"stats": words})
    house.server.presence._born = 0.0
    house.server.step(0)
    assert house.server.status.report()["waits"][-1] == "actor-1: its SGLang server is starting"
    with pytest.raises(BusError, match=r"launcher\.ready_timeout"):
        house.say("actor-1", "heartbeat", SIGN_OF_LIFE | {"stats": {"engine": "serving", "engine_note": ""}})


def test_numbers_of_actors_are_combined_as_their_keys_say_and_replace_none_of_the_buffers() -> None:
    house = House(asynchronous(max_staleness=1)).start()
    own = house.server.gauges.levels(house.server.peers, house.store, 0.0)
    for name, value in (("actor-0", 2.0), ("actor-1", 6.0)):
        keys = ["sum:rollout/sum", "now:rollout/now", "mean:rollout/mean", "max:rollout/max", "part:rollout/share"]
        stats = dict.fromkeys([*keys, "sum:rollout/actors"], value) | {"whole:rollout/share": 10.0}
        stats |= {"part:rollout/none": 0.0, "whole:rollout/none": 0.0}
        house.say(
            name, "heartbeat", SIGN_OF_LIFE | {"stats": stats | {"mean:rollout/one": 3.0} if value > 2 else stats}
        )
    told = house.server.gauges.levels(house.server.peers, house.store, 0.0)
    names = {"sum": 8.0, "now": 8.0, "mean": 4.0, "max": 6.0, "share": 0.4, "none": 0.0, "one": 3.0}
    new = {f"rollout/{name}": value for name, value in names.items()}
    assert {key: value for key, value in told.items() if key not in own} == new
    assert told["rollout/actors"] == own["rollout/actors"]


@pytest.mark.parametrize("by_itself", [True, False])
def test_a_group_on_which_actors_die_again_and_again_is_dropped(by_itself: bool) -> None:
    """Its episode may end the process that plays it. A kill from outside is no evidence against groups."""
    house = House(asynchronous(), actors=1).start()
    held = house.leases()
    house.finish(held[0], 0)
    for deaths in (1, 2, 3):
        how = {"how": "was killed by SIGSEGV", "for_good": False, "by_itself": by_itself}
        house.say("supervisor", "lost", {"name": "actor-0", "pid": 0, **how})
        entries = house.store.entries
        assert all((each in entries) == (deaths < 3 or not by_itself) for each in held[1:])
        house.hello("actor-0")
        house.apply(0)
    dropped = house.store.ledger()["dropped"]
    assert dropped.get("actor died", 0) == (len(held) - 1) * by_itself
    assert held[0] in house.store.entries, "it was pushed before"


@pytest.mark.parametrize(("reason", "tries"), [("reward crashed", 2), ("rejected", 1), ("no reward", 1)])
def test_a_group_that_failed_goes_to_another_actor_once(reason: str, tries: int) -> None:
    """But not where its answers were rejected."""
    house = House(asynchronous()).start()
    (group_id, *_), others = house.leases("actor-0"), house.leases("actor-1")
    for name in house.names[:tries]:
        assert group_id in house.leases(name) and group_id in house.store.entries
        house.say(name, "failed", {"id": group_id, "reason": reason, "detail": "why"})
        for each in others:
            house.push("actor-1", each, 0)
    assert house.store.ledger()["dropped"] == {reason: 1}


def test_an_actor_on_which_all_fails_takes_no_prompt_from_the_others() -> None:
    house, failed = House(asynchronous()).start(), list[int]()

    def play(version: int) -> None:
        for group_id in house.store.entries.held_by("actor-0").copy():
            failed.append(group_id)
            house.say("actor-0", "failed", {"id": group_id, "reason": "failed", "detail": "no such module"})
        for group_id in house.store.entries.held_by("actor-1").copy():
            house.push("actor-1", group_id, version)

    for batch in range(2 * MOST_FAILED):
        house.want(batch)
        while len(house.batches()) <= batch:
            play(batch)
        house.trained(batch)
    assert MOST_FAILED <= len(failed) < MOST_FAILED + B and "actor-0 gets no leases" in str(
        house.server.status.report()
    )
    assert not house.store.ledger()["dropped"] and {*failed} <= {each for batch in house.batches() for each in batch}


def tree_of(fanout: int, count: int) -> RelayTree:
    relays = RelayTree(fanout)
    for number in range(count):
        relays.join(f"a{number}", f"tcp://{number}", "")
    return relays


@pytest.mark.parametrize("fanout", [1, 2, 3, 16])
@pytest.mark.parametrize("count", [1, 2, 16, 100])
def test_each_serves_no_more_than_the_fan_out_whatever_comes_and_goes(fanout: int, count: int) -> None:
    relays, chance, alive = tree_of(fanout, count), random.Random(0), {f"a{number}" for number in range(count)}
    for turn in range(30):
        parents = {name: relays.above(name) for name in alive}
        served = Counter(above[0][0] if above else "the publisher" for above in parents.values())
        assert max(served.values()) <= fanout
        assert len(alive) <= fanout or served["the publisher"] == fanout
        for name, above in parents.items():  # a chain to the root, and no circle
            assert (f"tcp://{name[1:]}", "") not in above and len({each for each, _ in above}) == len(above)
            assert all(f"a{endpoint[6:]}" in alive for endpoint, _ in above)
        gone = chance.choice(sorted(alive))
        relays.leave(gone)
        alive.discard(gone)
        if turn % 3:
            relays.join(gone, f"tcp://{gone[1:]}", "")
            alive.add(gone)
        if not alive:
            break


def test_a_newcomer_is_sent_to_a_relay_before_it_offers_to_be_one() -> None:
    relays = tree_of(2, 6)
    assert relays.above("new") == [("tcp://2", ""), ("tcp://0", "")]
    assert RelayTree(0).above("new") == tree_of(0, 6).above("a5") == []


def batches(house: House) -> list[tuple[int, int, list[int]]]:
    """(index, number of batches set aside before, groups)."""
    sent = [body for _, kind, body in house.router.sent if kind == "batch"]
    return [(body["index"], body["redo"], [row[0] for row in body["table"]["groups"]]) for body in sent]


def play(policy) -> House:
    """Batch 0 is trained; batch 1 and, ahead of it, batch 2 are served, and batch 1 can't be trained."""
    house = House(asynchronous(max_staleness=2), batch_policy=policy)
    house.start()
    for group_id in range(3 * B):
        house.finish(group_id, 0)
    for index in range(2):
        house.want(index)
    house.say("learner", "trained", {"index": 0})
    house.publish(1)
    house.want(2)
    return house


def set_aside(house: House, index: int = 1, who: str = "learner") -> None:
    house.say(who, "untrainable", {"index": index, "reason": "a token of 1000000"})


@pytest.mark.parametrize("policy", [in_order, fifo])
def test_its_groups_are_dropped_and_others_take_their_places(policy) -> None:
    house = play(policy)
    for who, index in (("actor-0", 1), ("learner", 0), ("learner", 2)):  # only the next batch, only by the learner
        set_aside(house, index, who)
    assert house.router.refused == 3 and not house.store.ledger()["dropped"]
    for _ in range(2):  # repeated after a broken connection
        set_aside(house)
        assert house.router.sent[-1] == ("learner", "set_aside", {"index": 1, "redo": 1})
    replay = house.server.groups
    assert batches(house)[1:] == [(1, 0, [4, 5, 6, 7]), (2, 0, [8, 9, 10, 11])]
    assert replay.store.ledger()["dropped"] == {"untrainable": 4} and not replay.store.entries.of(Stage.SERVED)
    house.apply(1)
    house.want(1)
    for entry in replay.store.entries.of(*LEASED):
        house.push(entry.actor, entry.id, 1)
    house.say("learner", "trained", {"index": 1})
    house.publish(2)
    house.want(2)
    (_, redo, first), (_, _, second) = batches(house)[3:]
    assert redo == 1 and not {4, 5, 6, 7} & {*first, *second}
    if policy is in_order:
        assert sorted(first) == [12, 13, 14, 15] and second == [8, 9, 10, 11]


def drain(house: House) -> None:
    house.say("someone", "stop", {"drain": True})


def stops(house: House) -> list[dict]:
    return [body for who, kind, body in house.router.sent if kind == "stop" and who == "learner"]


def push_all(house: House, version: int) -> int:
    """Push every running group. Returns how many."""
    running = [(entry.actor, entry.id) for entry in house.store.entries.of(*LEASED)]
    for name, group_id in running:
        house.push(name, group_id, version)
    return len(running)


def started(scheduler, **rules) -> House:
    house = House(scheduler, **rules).start()
    house.want(0)
    return house


def train(house: House, index: int) -> None:
    house.want(index + 1)
    house.trained(index)


def test_without_draining_it_stops_before_the_next_version_and_not_within_one() -> None:
    """Two train steps make a version here."""
    house = started(asynchronous(max_staleness=1), interval=2)
    push_all(house, 0)
    house.say("someone", "stop", {"drain": False})
    house.say("learner", "want", {"index": 1, "version": 0})
    assert len(house.batches()) == 2 and len(stops(house)) == 1, "the second batch of a version comes"
    house.say("learner", "trained", {"index": 1})
    house.say("learner", "want", {"index": 2, "version": 1})
    assert len(house.batches()) == 2 and stops(house) == 2 * [{"drain": False}]


@pytest.mark.parametrize(("seconds", "ready", "ends"), [(9.0, False, False), (11.0, False, True), (11.0, True, False)])
def test_a_learner_that_waits_beyond_its_time_ends_unless_a_batch_is_complete(seconds, ready, ends) -> None:
    house = House(asynchronous(max_staleness=1)).start()
    if ready:
        push_all(house, 0)
    house.server.peers.clock = lambda: house.server.phase.started_at + seconds
    house.say("learner", "want", {"index": 0, "version": 0, "until": 10.0})
    house.server.step(0)
    assert stops(house) == ends * [{"drain": True, "late": True}] and len(house.batches()) == ready


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_run_whose_learner_does_not_confirm_the_stop_ends_without_it(confirmed: bool) -> None:
    house = started(asynchronous(max_staleness=1))
    for _ in range(2):
        house.say("someone", "stop", {"drain": False})
        if confirmed:
            house.say("learner", "stop", {"drain": False})
    house.server.peers.clock = lambda: time.monotonic() + 10.0
    with nullcontext() if confirmed else pytest.raises(SystemExit, match=str(EXIT_STOPPED)):
        house.server.step(0)


@pytest.mark.parametrize(("inflight", "batches"), [(4, 1), (6, 2)])
def test_the_last_batch_is_made_whole_and_a_failed_group_is_replaced(inflight: int, batches: int) -> None:
    house = started(asynchronous(max_staleness=1, max_inflight_groups=inflight))
    assert len(house.leases()) == inflight
    drain(house)
    failed = house.store.entries.of(*LEASED)[0]
    house.say(failed.actor, "failed", {"id": failed.id, "reason": "rejected", "detail": ""})
    while push_all(house, 0):
        pass
    for index in range(batches):
        assert not stops(house)
        train(house, index)
    assert stops(house) == [{"drain": True}]
    assert house.store.ledger()["trained"] == batches * B == len(house.leases()) - 1
