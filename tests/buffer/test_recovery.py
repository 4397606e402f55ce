"""Crashes with events in a fixed order; random ones are in `test_replay_properties`."""

import numpy as np
import pytest

from areal_like.types import Completion, PartialSample
from areal_like.wire.groups import make_head
from areal_like.wire.partials import encode_partial
from buffer.events import Begin, Drop, Finish
from buffer.groups import BatchPolicy, GroupManager
from buffer.journal import JournalError
from buffer.policies import Waiting, fifo
from buffer.staleness import Bound
from buffer.store import EventError, PartialGroup, Stage
from tests.buffer.paper import Paper

B = 2


def reborn(journal: Paper, next_batch: int, policy: BatchPolicy = fifo) -> GroupManager:
    replay = GroupManager(Bound(1, B), policy)
    journal.restore(replay, next_batch)
    return replay


def admit_and_push(replay: GroupManager, *ids: int, version: int = 0) -> None:
    for group_id in ids:
        replay.admit(group_id, 0, 1, 1, "actor", 0, 0.0)
    for group_id in reversed(ids):
        head = make_head(group_id, [(1, 2, 0, 1, 0.0)], [(version, 2)], {version: "digest"})
        replay.push(head, bytes(head.size), version, 0.0)


def train(replay: GroupManager, batch: int) -> list[int]:
    ids = [entry.id for entry in replay.serve(batch)]
    replay.finish(batch)
    return ids


def test_a_batch_that_was_trained_before_and_after_a_crash_is_trained_once() -> None:
    """The checkpoint is durable, the journal's new segment is not: the journal has batch 0 served twice."""
    journal = Paper()
    replay = reborn(journal, 0)
    admit_and_push(replay, 0, 1, 2, 3)
    assert train(replay, 0) == [3, 2]
    replay = reborn(journal, 0)
    assert train(replay, 0) == [3, 2]
    replay = reborn(journal, 1)
    assert replay.store.ledger() == {"admitted": 4, "trained": 2, "filtered": {}, "dropped": {}, "active": 2}
    assert train(replay, 1) == [1, 0]


def test_a_resume_with_other_settings_rolls_out_anew_what_later_weights_have_made() -> None:
    """Batch 1 was trained, but the checkpoint of step 2 was never written. Versions from 2 on will be other weights, so
    their groups are rolled out again; all others are trained as planned."""
    journal = Paper()
    replay = reborn(journal, 0)
    admit_and_push(replay, 0, 1)
    train(replay, 0)
    admit_and_push(replay, 2, 3, version=1)
    admit_and_push(replay, 4, version=1)
    train(replay, 1)
    admit_and_push(replay, 5, version=2)
    for group_id, versions in ((6, (1, 2)), (7, (1, 1))):
        replay.admit(group_id, 0, 1, 1, "actor", 1, 0.0)
        replay.hand_back(group_id, made_by(group_id, *versions))
    for again in (False, True):  # the second time by the events of the first
        replay = reborn(journal, 1)
        if not again:
            assert replay.branch_off(1, "learner.lr=1 (was 2)") == 1
        assert {entry.id for entry in replay.store.of(Stage.WAITING)} == {2, 3, 4}
        assert {entry.id for entry in replay.store.of(Stage.QUEUED)} == {5, 6, 7}
        assert replay.store.entries[6].partial is None and replay.store.entries[7].partial
    assert train(replay, 1) == [3, 2]


def made_by(group_id: int, *versions: int) -> PartialGroup:
    """An unfinished sample with one token of each version."""
    runs = [(version, 1) for version in versions]
    call = Completion(np.zeros(len(runs), np.int32), np.zeros(len(runs), np.float32), runs, "abort")
    encoded = encode_partial(group_id, {0: PartialSample({(1, 0): call})}, dict.fromkeys(versions, "digest"))
    assert encoded
    return PartialGroup(*encoded)


def test_an_event_that_does_not_fit_ends_the_buffer_and_is_not_taken_for_a_fault_of_a_message() -> None:
    """The journal already has the event."""
    replay = reborn(Paper(), 0)
    with pytest.raises(EventError, match=r"Drop\(id=7, reason='why'\) does not fit what has happened before"):
        replay.commit(Drop(7, "why"))
    assert not issubclass(EventError, ValueError | KeyError)


def last_done(group: Waiting) -> int:
    return group.pushed


def test_a_batch_that_was_trained_before_word_of_it_was_recorded_is_recorded_at_the_restart() -> None:
    """Otherwise a replay of the journal would end before that batch."""
    journal = Paper()
    replay = reborn(journal, 0)
    admit_and_push(replay, 0, 1)
    replay.serve(0)
    reborn(journal, 1)
    assert [record.event for record in journal.records[-2:]] == [Finish(0), Begin(1)]


def test_on_policy_what_the_same_weights_have_made_is_kept_where_the_way_there_changes() -> None:
    journal = Paper()
    replay = GroupManager(Bound(0, B), fifo)
    journal.restore(replay, 0)
    admit_and_push(replay, 0, 1)
    replay.serve(0)
    again = GroupManager(Bound(0, B), fifo)
    journal.restore(again, 0)
    again.drop(0, "malformed")
    admit_and_push(again, 2)
    assert sorted(train(again, 0)) == [1, 2] and again.store.requeued == 0


@pytest.mark.parametrize("lost", [False, True])
def test_on_policy_what_newer_weights_made_before_a_crash_is_rolled_out_again_where_the_way_there_changes(
    lost: bool,
) -> None:
    """Batches 0 and 1 were trained, and the checkpoint has neither. Batch 0 can't be served as before; fifo would put
    groups of batch 1 into it."""
    journal = Paper()

    def made() -> GroupManager:
        replay = GroupManager(Bound(0, B), fifo)
        journal.restore(replay, 0)
        return replay

    replay = made()
    for version, ids in enumerate([(0, 1), (2, 3)]):
        for group_id in ids:
            replay.admit(group_id, 0, 1, 1, "actor", version, 0.0)
            head = make_head(group_id, [(1, 2, 0, 1, 0.0)], [(version, 2)], {version: "digest"})
            replay.push(head, bytes(head.size), version, 0.0)
        assert train(replay, version) == list(ids)
    replay = made()
    assert [entry.id for entry in replay.serve(0)] == [0, 1]
    replay.unserve(0)
    replay.requeue(0) if lost else [replay.drop(group_id, "untrainable") for group_id in (0, 1)]
    assert replay.serve(0) == []
    assert [replay.store.entries[each].stage for each in (2, 3)] == [Stage.QUEUED] * 2
    while entry := replay.queued_for(0):
        replay.assign(entry, "actor", 0)
        head = make_head(entry.id, [(1, 2, 0, 1, 0.0)], [(0, 2)], {0: "digest"})
        replay.push(head, bytes(head.size), 0, 0.0)
    if not lost:
        admit_and_push(replay, 4, 5)
    assert sorted(train(replay, 0)) == ([0, 1] if lost else [4, 5])


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_choice_breaks_the_bound(bound: int) -> None:
    """The last check looks at the pushed groups, after any earlier fault. At the bound groups are served; one version
    later they are refused and stay where they are, even a single one among young groups."""

    def serving(batch: int, *versions: int) -> GroupManager:
        replay = GroupManager(Bound(bound, B), fifo)
        replay._expire = lambda version: None  # type: ignore[method-assign]
        for group_id, version in enumerate(versions):
            admit_and_push(replay, group_id, version=version)
        replay.serve(batch)
        return replay

    assert serving(bound + 4, 4, 4).store.staleness_max == bound
    for versions in [(0, 0), (0, bound + 1), (bound + 1, 0)]:
        with pytest.raises(RuntimeError, match=f"batch {bound + 1} would break the staleness bound of {bound}"):
            serving(bound + 1, *versions)


def test_a_checkpoint_that_lacks_what_the_snapshot_counts_as_trained_is_refused() -> None:
    """The newest checkpoint was deleted: its batches are lost, and the learner would wait forever."""
    journal = Paper()
    replay = reborn(journal, 0)
    admit_and_push(replay, 0, 1, 2, 3)
    train(replay, 0)
    train(replay, 1)
    journal.rotate(replay)
    assert reborn(journal, 2).store.trained == 4
    with pytest.raises(JournalError, match="4 trained groups, but the newest checkpoint, of step 1, has 2"):
        reborn(journal, 1)
