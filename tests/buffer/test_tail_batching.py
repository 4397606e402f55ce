"""Rounds with more groups than places, group sizes that follow stragglers, and groups handed back unfinished, with
events in a fixed order."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from areal_like.wire.messages import PartialHead
from buffer.entries import LEASED, PartialGroup, Stage
from buffer.groups import GroupManager
from buffer.policies import fifo, in_order
from buffer.recovery import forget_partial
from buffer.rounds import SyncScheduler
from buffer.sizing import Fixed, GroupLengths, Sagc, Sizing, check_sizes
from buffer.staleness import Bound
from tests.buffer.histories import SIZINGS, head_of
from tests.buffer.house import B, House, asynchronous, partial_group, table


def started(scheduler: SyncScheduler, **rules) -> House:
    house = House(scheduler, **rules).start()
    house.want(0)
    return house


def owner(house: House, group_id: int) -> str:
    return house.store.entries[group_id].actor


def hand_back(house: House, *ids: int) -> None:
    for group_id in ids:
        house.say(owner(house, group_id), "hand_back", {"ids": [group_id], "partials": [], "leaving": False})


def test_the_first_done_are_kept_and_the_others_are_recalled_in_the_same_turn() -> None:
    house = started(SyncScheduler(Fixed(group_size=8), oversample_prompts=1.5))
    launched = sorted(house.leases())
    assert launched == list(range(6)) and len(house.store.entries.redundant) == 2
    for group_id in (5, 4, 3, 2):
        assert not [body for _, kind, body in house.router.sent if kind == "cancel"]
        house.finish(group_id, 0)
    assert sorted(house.batches()[0]) == [2, 3, 4, 5]
    cancels = [(who, body) for who, kind, body in house.router.sent if kind == "cancel"]
    assert len(cancels) == 2 and all((owner(house, i), {"ids": [i], "hand_back": True}) in cancels for i in (0, 1))
    hand_back(house, 0, 1)
    assert [entry.id for entry in house.store.entries.of(Stage.DEFERRED)] == [0, 1]
    house.push(owner(house, 0), 0, 0)
    assert house.store.entries[0].stage is Stage.DEFERRED, "too late: its round is closed"


def test_a_long_round_takes_from_the_queue_alone_first_in_first_out() -> None:
    house = started(SyncScheduler(Fixed(group_size=8), oversample_prompts=1.5))
    deferred: list[int] = []
    for batch in range(3):
        running = sorted(entry.id for entry in house.store.entries.of(*LEASED))
        if batch == 2:
            assert running == sorted(deferred) and house.server.dispatcher.scheduler.long
        for group_id in running[-B:]:
            house.finish(group_id, batch)
        hand_back(house, *running[:-B])
        deferred += running[:-B]
        house.trained(batch)
        house.want(batch + 1)
    assert [sorted(ids) for ids in house.batches()] == [[2, 3, 4, 5], [8, 9, 10, 11], [0, 1, 6, 7]]
    assert not house.server.dispatcher.scheduler.long


def test_only_short_rounds_start_more_responses_than_they_need() -> None:
    scheduler = SyncScheduler(Fixed(group_size=8), oversample_prompts=1.25, oversample_responses=1.25)
    assert scheduler.open_batch(32, 0, []) == 4 and (scheduler.long, scheduler.launch) == (False, 10)
    assert scheduler.open_batch(32, 4, []) == 4 and (scheduler.long, scheduler.launch) == (True, 8)


def test_a_long_round_waits_for_what_is_still_being_handed_back() -> None:
    house = started(SyncScheduler(Fixed(group_size=8), oversample_prompts=2.0))
    for group_id in (4, 5, 6, 7):
        house.finish(group_id, 0)
    hand_back(house, 0, 1)
    house.want(1)
    house.trained(0)
    assert house.server.dispatcher.scheduler.long and sorted(house.leases()[8:]) == [0, 1]
    hand_back(house, 2, 3)
    assert sorted(house.leases()[8:]) == [0, 1, 2, 3], "the queue alone, no new prompt"


def test_the_controller_is_told_of_responses_that_had_not_begun() -> None:
    house = started(SyncScheduler(SIZINGS["restless"](), oversample_prompts=1.5))
    last, size = max(house.leases()), house.server.dispatcher.scheduler.group_size
    for group_id in range(last):
        if house.store.entries[group_id].stage is Stage.RUNNING and not house.batches():
            head, payload = head_of(group_id, 0, size)
            house.say(owner(house, group_id), "push", table(head), payload)
    house.server.gauges.seen.clear()
    meta, part = partial_group(last, [(0, 3)], first="stop")
    house.say(owner(house, last), "hand_back", {"ids": [last], "partials": [meta], "leaving": False}, part)
    (seen,) = house.server.gauges.seen
    assert seen == GroupLengths((3,) + (0,) * (size - 1), (False,) + (True,) * (size - 1)) and size > 1


class Growing(Sizing):
    """A user's own controller: groups of 8, then of 32."""

    sizes = (8, 16, 32)

    def __init__(self) -> None:
        super().__init__(group_size=8)

    def next_size(self, seen: Sequence[GroupLengths]) -> int:
        self.group_size, now = 32, self.group_size
        return now


def test_the_last_rounds_have_places_for_all_that_wait_whatever_the_controller_would_like() -> None:
    house = started(SyncScheduler(Growing(), oversample_prompts=1.5), last_batch=2)
    for group_id in (2, 3, 4, 5):
        house.finish(group_id, 0)
    house.want(1)
    hand_back(house, 0, 1)
    house.trained(0)
    running = house.store.entries.of(*LEASED)
    assert [(entry.id, entry.need) for entry in running] == [(0, 16), (1, 16)], "one of 32 would leave a prompt over"
    assert house.server.dispatcher.scheduler.metrics()["sizing/group_size"] == 16


@pytest.mark.parametrize("versions", [(0, 0), (1, 2), (2, 2)])
def test_strict_rounds_serve_nothing_but_the_current_version(versions: tuple[int, int]) -> None:
    """The last check, after admission: among admitted groups, neither older nor newer tokens are trained."""
    replay = GroupManager(Bound(0, 1), partial(in_order))
    for group_id, made in enumerate([(0, 0), versions]):
        replay.admit(group_id, group_id, 2, 2, "a", 0, 0.0)
        head, payload = head_of(group_id, made[1], 2, oldest=made[0])
        replay.push(head, payload, 1, 0.0)
    assert [entry.id for entry in replay.serve(0)] == [0]
    replay.finish(0)
    if versions[0] < 1:
        assert replay.serve(1) == [] and replay.store.ledger()["dropped"].get("stale") == 1
    else:
        with pytest.raises(RuntimeError, match="off-policy"):
            replay.serve(1)


def test_rounds_with_stale_tokens_need_groups_that_are_cut() -> None:
    with pytest.raises(ValueError, match="mode=sync allows 0 only"):
        SyncScheduler(Fixed(), max_staleness=2)


Left = tuple[PartialHead, bytes]


def left_of(group_id: int, *versions: int) -> Left:
    """A partial group with three tokens of each sample, made by one version."""
    return partial_group(group_id, *([(version, 3)] for version in versions))


def give_back(house: House, actor: str, ids: list[int], *left: Left, leaving: bool = False) -> None:
    body = {"ids": ids, "partials": [meta for meta, _ in left], "leaving": leaving}
    house.say(actor, "hand_back", body, *(payload for _, payload in left))


def carried(house: House, actor: str) -> dict[int, list[int]]:
    """Group → samples that an actor's leases carried."""
    sent = [body for who, kind, body in house.router.sent if kind == "lease" and who == actor]
    return {meta["id"]: usable for body in sent for meta, usable in body["partials"]}


def test_an_actor_that_leaves_has_its_groups_gone_on_with_by_the_others() -> None:
    house = House(asynchronous(max_staleness=1)).start()
    first, second, *_ = lost = house.leases("actor-1")
    give_back(house, "actor-1", lost[:-1], left_of(first, 0, 0), left_of(second, 0), leaving=True)
    assert "actor-1" not in house.server.fleet.by_name
    assert carried(house, "actor-0") == {first: [0, 1], second: [0]}
    assert set(lost) <= set(house.leases("actor-0")), "what it did not name goes to others, too"
    house.push("actor-0", first, 0)
    assert house.store.entries[first].partial is None


def test_a_sample_and_the_lease_that_carries_it_are_as_old_as_its_oldest_token() -> None:
    left = PartialGroup(*partial_group(0, [(0, 1), (1, 2)], [(1, 3)]))
    assert left.usable(0) == {0: 0, 1: 1} and left.usable(1) == {1: 1}
    assert left.ended == 0, "both were cut"
    replay = GroupManager(Bound(2, 1), fifo)
    entry = replay.admit(0, 0, 2, 2, "actor", 0, 0.0)
    replay.hand_back(0, left)
    assert replay.assign(entry, "actor", 2) == {0: 0, 1: 1} and entry.lease_version == 0


def test_an_unfinished_sample_continues_no_other_prompt() -> None:
    replay = GroupManager(Bound(2, 1), fifo)
    entry = replay.admit(0, 0, 2, 2, "actor", 0, 0.0)
    replay.hand_back(0, PartialGroup(*partial_group(0, [(0, 1)])))
    forget_partial(replay)
    assert entry.partial is None and replay.assign(entry, "actor", 2) == {}


def overtaken(house: House) -> int:
    """A straggler of actor-0, begun at version 0; the other groups are done, and version 2 is published."""
    straggler = house.leases("actor-0")[0]
    for batch in range(2):
        for _ in range(B):
            entry = next(e for e in house.store.entries.of(*LEASED) if e.id != straggler)
            house.push(entry.actor, entry.id, batch)
        house.want(batch)
        house.trained(batch)
    house.want(2)
    return straggler


def test_a_straggler_that_got_too_old_is_recalled_and_its_young_samples_are_kept() -> None:
    house = House(asynchronous(max_staleness=1), batch_policy=fifo, staleness_policy="requeue").start()
    straggler = overtaken(house)
    entry = house.store.entries[straggler]
    assert ("actor-0", "cancel", {"ids": [straggler], "hand_back": True}) in house.router.sent
    assert entry.stage is Stage.RECALLED, "it runs until its actor answers"
    train_version = house.server.groups.bound.slot_version(entry.slot)
    meta, payload = left_of(straggler, 0, 2, 1)
    give_back(house, "actor-0", [straggler], (meta, payload))
    found = carried(house, "actor-0") | carried(house, "actor-1")
    assert found == {straggler: [index for index, made in enumerate((0, 2, 1)) if made >= train_version - 1]}
    assert 0 not in found[straggler] and entry.lease_version >= train_version - 1
    cancels = [body for _, kind, body in house.router.sent if kind == "cancel"]
    assert len(cancels) == 1, "asked once"


@pytest.mark.parametrize("lie", ["digest", "version", "index", "size"])
def test_a_lie_ends_the_lease_and_carries_nothing(lie: str) -> None:
    house = House(asynchronous()).start()
    group_id = house.leases("actor-0")[0]
    head, payload = left_of(group_id, 0, 0)
    if lie == "digest":
        head.digests[0] = "other"
    elif lie == "version":  # that nobody has published
        head.calls[0].runs, head.digests[7] = [(7, 3)], "d7"
    elif lie == "index":
        head.calls[1].sample = 8
    elif lie == "size":
        payload += b"1"
    give_back(house, "actor-0", [group_id, 9999], (head, payload))
    again = house.leases("actor-0") + house.leases("actor-1")
    assert again.count(group_id) == 2
    assert house.store.entries[group_id].partial is None and house.store.bytes == 0


def test_only_the_owner_hands_a_group_back() -> None:
    house = House(asynchronous()).start()
    group_id = house.leases("actor-0")[0]
    for name in ("actor-1", "a stranger"):
        give_back(house, name, [group_id], left_of(group_id, 0))
    assert house.store.entries[group_id].actor == "actor-0" and house.store.bytes == 0


def done(*tokens: int) -> GroupLengths:
    return GroupLengths(tokens, (False,) * len(tokens))


def test_risk_is_that_of_the_beta_posterior() -> None:
    sagc = Sagc(candidates=[4, 8])
    sagc.a, sagc.b = 2.0, 30.0
    p = np.random.default_rng(0).beta(2.0, 30.0, 400_000)
    for size in (4, 8):
        assert sagc.risk(size) == pytest.approx(1 - np.mean((1 - p) ** size), abs=2e-3)


def test_the_dual_variable_and_the_choice_by_hand() -> None:
    sagc = Sagc(candidates=[2, 4], budget=0.25, straggler_ratio=3.0, forget=0.5, group_size=4)
    assert sagc.next_size([]) == 4 and sagc.steps == 0, "no evidence: the largest"
    sagc.next_size([done(1, 1, 1, 10), done(1, 1, 1, 1)])
    assert (sagc.a, sagc.b) == (0.5 + 1, 0.5 + 7)
    assert sagc.queue == 0.25 and sagc.share == 0.5
    score = {size: math.log(size) / math.log(4) - 0.25 * sagc.risk(size) for size in (2, 4)}
    assert sagc.chosen == max(score, key=score.get)
    sagc.queue = 100.0
    assert sagc.next_size([]) == 2
    metrics = sagc.metrics()
    assert metrics["sizing/dual"] == 100.0 and metrics["sizing/group_size"] == 2 and "sizing/risk_4" in metrics


def test_cut_responses_are_lower_bounds() -> None:
    sagc = Sagc(candidates=[4], group_size=4, forget=1.0)
    sagc.next_size([GroupLengths((1, 1, 1, 10), (False, False, False, True))])
    assert (sagc.a, sagc.b, sagc.share) == (2.0, 4.0, 1.0), "past the threshold already: a straggler"
    sagc.next_size([GroupLengths((1, 1, 1, 2), (False, False, False, True))])
    assert (sagc.a, sagc.b, sagc.steps) == (2.0, 7.0, 1), "of this one nothing is known, and nothing of its group"
    sagc.next_size([GroupLengths((1, 2, 2, 10), (False, True, True, True))])
    assert (sagc.a, sagc.b, sagc.steps) == (2.0, 8.0, 1), "others that began later may become as long"


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [False, True])
def test_the_long_run_share_keeps_to_the_budget_in_every_quarter(hidden: bool) -> None:
    """Lengths drift. `hidden`: lengths beyond 4 medians are cut there, and the controller sees only that they are
    longer."""
    sagc, random, steps = Sagc(budget=0.3), np.random.default_rng(1), 4000
    shares, sizes, seen = [], [], []
    for step in range(steps):
        size = sagc.next_size(seen)
        sigma = 0.6 + 0.12 * math.sin(4 * math.pi * step / steps)
        groups = np.exp(sigma * random.standard_normal((128 // size, size)))
        medians = np.median(groups, 1)
        shares.append(np.mean(groups.max(1) > 3 * medians))
        sizes.append(size)
        limits = 4 * medians[:, None] if hidden else np.inf
        cut = groups > limits
        seen = [
            GroupLengths(tuple(t), tuple(c))
            for t, c in zip(np.minimum(groups, limits).tolist(), cut.tolist(), strict=True)
        ]
    assert np.abs(np.array(shares).reshape(4, -1).mean(1) - 0.3).max() < 0.01
    quarters = np.array(sizes).reshape(8, -1).mean(1)
    assert quarters.min() < 8 < 16 < quarters.max(), "sizes follow the drift"
    assert sagc.metrics()["sizing/straggler_share_mean"] == pytest.approx(np.mean(shares[:-1]), abs=1e-9)


def test_a_batch_keeps_its_samples() -> None:
    assert check_sizes(Sagc(group_size=8), 16) == 128 == check_sizes(Fixed(group_size=8), 16)
    with pytest.raises(ValueError, match=r"sizing\.candidates: groups of 32 can't make up a batch of 48"):
        check_sizes(Sagc(group_size=8), 6)


@pytest.mark.parametrize("candidates", [[], [1, 8], [8, 4], [4, 4], [4.0, 8.0], ["few", "many"], [True, 8]])
def test_candidates_are_ascending_whole_numbers(candidates: list) -> None:
    with pytest.raises(ValueError, match=r"sizing\.candidates must be ascending whole numbers >= 2, not \["):
        Sagc(candidates=candidates)
