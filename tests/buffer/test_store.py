"""What the store says of itself after each event: memory, slots, order."""

import math
from functools import partial

import pytest

from areal_like.wire.groups import make_head
from areal_like.wire.messages import PartialHead
from buffer import policies
from buffer.groups import GroupManager
from buffer.policies import fifo, in_order
from buffer.staleness import Bound
from buffer.store import PartialGroup, Stage


def replay_of(policy=in_order, size: int = 2, **rules) -> GroupManager:
    return GroupManager(Bound(5, size), partial(policy), **rules)


def admit(replay: GroupManager, *ids: int) -> None:
    for group_id in ids:
        replay.admit(group_id, group_id, 1, 1, "actor", 0, 0.0)


def push(replay: GroupManager, *ids: int) -> None:
    for group_id in ids:
        head = make_head(group_id, [(1, 2, 0, 1, 0.0)], [(0, 2)], {0: "d0"})
        assert replay.push(head, bytes(head.size), 0, 0.0)


def test_its_bytes_are_those_of_all_payloads_that_it_holds() -> None:
    """The limit of memory rests on this number."""
    replay = replay_of(group_filter=lambda rewards, lengths: "")
    left = PartialGroup(PartialHead(0, b"", b"", b"", {0: "d0"}), b"x" * 70)

    def whole(*ids: int) -> int:
        return sum(len(replay.store.entries[each].payload) for each in ids)

    admit(replay, 0, 1, 2, 3)
    assert replay.store.bytes == 0
    replay.hand_back(0, left)
    assert replay.store.bytes == replay.store.entries[0].size == 70
    push(replay, 1)
    assert replay.store.bytes == 70 + whole(1) and whole(1) > 0
    replay.hand_back(2, left)
    replay.drop(2, "stale")
    assert replay.store.bytes == 70 + whole(1), "a partial group that leaves takes its bytes with it"
    push(replay, 0)
    assert replay.store.bytes == whole(0, 1), "the whole group replaces its parts"
    replay.requeue(0)
    assert replay.store.bytes == whole(1) and replay.store.entries[0].stage is Stage.QUEUED
    replay.assign(replay.store.entries[0], "actor", 0)
    push(replay, 0)
    replay.serve(0)
    assert replay.store.bytes == whole(0, 1), "until the learner has trained them"
    replay.finish(0)
    assert replay.store.bytes == 0 and replay.store.ledger()["trained"] == 2
    assert replay.store.requeued == 3, "two were handed back, one had to be rolled out again"


def test_a_filtered_group_leaves_no_bytes_and_gives_its_slot_back() -> None:
    replay = replay_of(group_filter=policies.zero_variance)
    admit(replay, 0, 1)
    push(replay, 0)
    assert replay.store.bytes == 0 and replay.store.slots.next == 0
    assert sum(replay.store.ledger()["filtered"].values()) == 1 and 0 not in replay.store.entries


@pytest.mark.parametrize(("staleness_policy", "first_slot"), [("drop", 12.0), ("mask_tokens", math.inf)])
def test_what_is_left_of_earlier_leases_wants_an_early_slot(staleness_policy: str, first_slot: float) -> None:
    """The bound is 5 versions of 2 groups: tokens of version 0 can be in slots below 12, or be masked."""
    replay = replay_of(staleness_policy=staleness_policy)
    admit(replay, 0, 1)
    replay.hand_back(0, PartialGroup(PartialHead(0, b"", b"", b"", {0: "d0"}), b"x" * 70))
    assert [holder.soft_deadline for holder in replay._holders()] == [first_slot, math.inf]


def test_no_two_groups_ever_have_one_slot_though_a_batch_jumps_the_queue() -> None:
    """Slot 0 is free when a batch of later groups takes it: whoever comes next must not get it again."""
    replay = replay_of(fifo)
    admit(replay, 0, 1, 2, 3)
    replay.drop(0, "stale")
    assert replay.store.slots.next == 0
    push(replay, 3, 2)
    assert [entry.id for entry in replay.serve(0)] == [3, 2]
    assert {entry.id: entry.slot for entry in replay.store.entries.values()} == {3: 0, 2: 1, 1: 2}
    admit(replay, 4, 5)
    slots = [entry.slot for entry in replay.store.entries.values()]
    assert sorted(slots) == list(range(5)), "no gap, none twice"
    assert replay.store.slots.used == 5


def test_what_comes_first_is_known_after_slots_have_changed() -> None:
    """A batch of the groups with the last slots gives all others new ones."""
    replay = replay_of(fifo)
    admit(replay, 0, 1, 2, 3, 4, 5)
    replay.drop(0, "stale")
    replay.requeue(1)
    push(replay, 5, 4, 3)
    replay.serve(0)
    slots = {entry.id: entry.slot for entry in replay.store.entries.values() if entry.stage is not Stage.SERVED}
    assert sorted(slots.values()) == [2, 3, 4]
    queued, waiting = replay.store.first_queued, replay.store.first_waiting
    assert queued is not None and (queued.id, queued.slot) == (1, slots[1])
    assert waiting is not None and (waiting.id, waiting.slot) == (3, slots[3])
    lowest = min((slots[each], each) for each in (1, 2))
    assert replay.store.lowest_open == lowest, "of those that are not done"


def test_groups_of_a_stage_are_in_the_order_in_which_they_came() -> None:
    replay = replay_of()
    admit(replay, 0, 1, 2)
    push(replay, 2, 0)
    assert [entry.id for entry in replay.store.of(Stage.WAITING, Stage.RUNNING)] == [2, 0, 1]
    assert replay.store.count(Stage.WAITING, Stage.RUNNING) == 3 and replay.store.count(Stage.QUEUED) == 0
    first = replay.store.first(Stage.WAITING)
    assert first is not None and first.id == 2
    lowest = replay.store.first_waiting
    assert lowest is not None and lowest.id == 0 and replay.store.lowest_open == (1, 1)
    replay.drop(0, "stale")
    assert replay.store.lowest_open == (0, None), "the slot that it left is free"
