"""Rounds with more groups than places, through the real controller, with events in a fixed order."""

from collections.abc import Sequence
from functools import partial

import pytest

from buffer.entries import LEASED, Stage
from buffer.groups import GroupManager
from buffer.policies import in_order
from buffer.rounds import SyncScheduler
from buffer.sizing import Fixed, GroupLengths, Sizing
from buffer.staleness import Bound
from tests.buffer.histories import SIZINGS, head_of
from tests.buffer.house import B, House, partial_group, table


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
