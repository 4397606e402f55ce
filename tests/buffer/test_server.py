"""The controller's decisions with events in a fixed order: leases, and served groups."""

import math

import pytest

from areal_like.wire.link import BusError
from buffer.events import LeaveOut
from buffer.peers import MOST_FAILED
from buffer.policies import none, zero_variance
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
def test_a_group_that_leaves_untrained_gives_its_slot_to_the_next_prompt(fate: str) -> None:
    house = House(asynchronous(max_staleness=0), group_filter=zero_variance if fate == "filtered" else none).start()
    if fate == "filtered":
        house.finish(0, 0)
        assert house.router.sent[-1] == ("actor-0", "pushed", {"ids": [0]})
        house.server.groups.group_filter = none
    else:
        house.say("actor-0", "failed", {"id": 0, "reason": "rejected", "detail": ""})
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


@pytest.mark.parametrize(("reason", "tries"), [("reward crashed", 2), ("rejected", 1)])
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
