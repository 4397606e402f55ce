"""The store's own numbers after each event: memory, slots, order."""

from functools import partial

from areal_like.wire.groups import make_head
from areal_like.wire.messages import PartialHead
from buffer import policies
from buffer.groups import GroupManager
from buffer.policies import in_order
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
