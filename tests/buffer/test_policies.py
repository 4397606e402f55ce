"""Each policy's choices, and the treatment of stragglers that a choice would leave behind."""

import pytest

from areal_like.wire.groups import make_head
from buffer.batching import Holder, rescue
from buffer.entries import LEASED, Stage
from buffer.groups import GroupManager
from buffer.policies import Waiting, fifo, in_order, zero_variance
from buffer.staleness import Bound

B = 2
GROUPS = [
    Waiting(10 + slot, slot, 0, pushed, left) for slot, pushed, left in ((0, 3, 1), (1, 0, 2), (3, 2, 0), (4, 1, 2))
]


@pytest.mark.parametrize(
    ("policy", "want", "chosen"),
    [
        (in_order, 2, (10, 11)),
        (fifo, 2, (11, 14)),
        (in_order, 3, ()),  # it alone waits for a missing slot
        *((policy, 5, ()) for policy in (in_order, fifo)),
    ],
)
def test_each_policy_has_its_order(policy, want: int, chosen: tuple[int, ...]) -> None:
    assert policy(GROUPS, {2}, want) == chosen


# Stragglers: B = 2, bound 1. Group 0 starts on version 0 and runs; all others are quick.


def history(staleness_policy: str) -> tuple[GroupManager, list[list[int]]]:
    """Served groups, with two batches' worth of quick groups per batch. Stops when a batch has to wait."""
    replay, served, next_id = GroupManager(Bound(1, B), fifo, staleness_policy), [], 0
    for batch in range(4):
        while replay.room(batch) > 0:
            replay.admit(next_id, 0, 1, 1, "slow" if next_id == 0 else "quick", batch, 0.0)
            next_id += 1
        for entry in replay.store.entries.of(*LEASED):
            if entry.actor == "quick":
                push(replay, entry.id, batch)
        entries = replay.serve(batch)
        if not entries:
            break
        served.append([entry.id for entry in entries])
        replay.finish(batch)
    return replay, served


def push(replay: GroupManager, group_id: int, *versions: int) -> bool:
    runs = [(version, 2) for version in versions]
    head = make_head(group_id, [(1, 2 * len(runs), 0, len(runs), 0.0)], runs, dict.fromkeys(versions, "digest"))
    return replay.push(head, bytes(head.size), max(versions), 0.0)


def test_wait_holds_the_last_batch_that_can_take_the_straggler() -> None:
    replay, served = history("wait")
    assert len(served) == 1, "batch 1 is the last in which version 0 is young enough"
    push(replay, 0, 0)
    assert 0 in [entry.id for entry in replay.serve(1)]
    assert not replay.store.ledger()["dropped"] and replay.store.staleness_max == 1


def test_drop_goes_on_without_the_straggler_and_ends_its_lease() -> None:
    replay, served = history("drop")
    assert len(served) == 4
    assert replay.store.ledger()["dropped"] == {"stale": 1} and replay.take_cancels() == [("slow", 0, False)]
    assert not push(replay, 0, 0), "it comes too late"


def test_requeue_gives_the_straggler_a_new_lease() -> None:
    replay, served = history("requeue")
    assert len(served) == 4 and not replay.store.ledger()["dropped"]
    assert replay.take_cancels() == [("slow", 0, False)] and replay.take_cancels() == []
    assert replay.store.entries[0].stage is Stage.QUEUED and replay.queued_for(3) is replay.store.entries[0]


def test_mask_tokens_serves_the_straggler_for_its_young_tokens() -> None:
    replay, served = history("mask_tokens")
    assert len(served) == 4 and not replay.store.ledger()["dropped"] and replay.store.entries[0].stage is Stage.RUNNING
    push(replay, 0, 0, 2, 3)
    while replay.room(4) > 0:
        replay.admit(100 + replay.store.counts.admitted, 0, 1, 1, "quick", 4, 0.0)
        push(replay, 99 + replay.store.counts.admitted, 4)
    assert 0 in [entry.id for entry in replay.serve(4)] and replay.ages.oldest_allowed(4) == 3
    assert replay.store.entries[0].oldest_trained(3) == 3 and replay.store.staleness_max == 1


def test_mask_tokens_drops_a_group_without_a_young_token() -> None:
    replay, _ = history("mask_tokens")
    push(replay, 0, 0, 1)
    replay.serve(4)
    assert replay.store.ledger()["dropped"] == {"stale": 1}


def test_a_choice_that_is_no_batch_is_refused() -> None:
    replay = GroupManager(Bound(1, B), lambda waiting, missing, want: (waiting[0].id, waiting[0].id))
    for group_id in range(B):
        replay.admit(group_id, 0, 1, 1, "a", 0, 0.0)
        push(replay, group_id, 0)
    with pytest.raises(ValueError, match=r"the batch policy chose \[0, 0\]"):
        replay.serve(0)


HERE = [Holder(0, 0, 4, here=True), Holder(1, 1, 4, here=True), Holder(2, 2, 8, True), Holder(3, 3, 12, True)]
HOPELESS = [Holder(n, n, 4, running=n > 1, here=n < 2) for n in range(3)]


@pytest.mark.parametrize(
    ("picked", "holders", "found"),
    [
        ([3, 2], HERE, (0, 1)),  # a rescued group takes the place of the least urgent
        ([3, 0], [HERE[0], *HERE[2:]], (3, 0)),
        ([0, 1], HOPELESS, (0, 1)),  # a group that is lost anyway holds nobody up
    ],
)
def test_rescue(picked: list[int], holders: list[Holder], found: tuple[int, ...]) -> None:
    assert rescue(picked, holders, 4) == found


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [([1.0, 1.0], False), ([0.3, 0.1 + 0.2], False), ([-7.0, -7.000001], False), ([0.0, 1e-3], True), ([0.0], False)],
)
def test_rewards_that_differ_by_rounding_are_equal(rewards: list[float], kept: bool) -> None:
    assert zero_variance(rewards, []) == ("" if kept else "zero variance")
