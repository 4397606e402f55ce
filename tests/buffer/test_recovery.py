"""Crashes with events in a fixed order (random ones: `test_histories`), and the files that a start needs."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_like.run import checkpoints
from areal_like.wire.groups import make_head
from areal_like.wire.stored import load
from buffer import main
from buffer.entries import Stage
from buffer.events import Begin, Drop, Finish, Open, Push, Requeue, Serve
from buffer.gauges import Gauges
from buffer.groups import GroupManager
from buffer.journal import JournalError, Record, segments
from buffer.policies import fifo
from buffer.recovery import branch_off
from buffer.replay_server import ReplayServer, count_batches, recorded_batches
from buffer.schedulers import AsyncScheduler
from buffer.sizing import GroupLengths, Sagc
from buffer.staleness import Bound
from buffer.store import EventError
from tests.buffer.house import FakeRouter, said
from tests.buffer.paper import Paper, admitted, rolled_out
from tests.buffer.test_journal import write

B = 2


def reborn(journal: Paper, next_batch: int, bound: int = 1) -> GroupManager:
    replay = GroupManager(Bound(bound, B), fifo)
    journal.restore(replay, next_batch)
    return replay


def push(replay: GroupManager, *ids: int, version: int = 0) -> None:
    for group_id in ids:
        head = make_head(group_id, [(1, 2, 0, 1, 0.0)], [(version, 2)], {version: "digest"})
        assert replay.push(head, bytes([group_id]) * head.size, version, 0.0)


def admit_and_push(replay: GroupManager, *ids: int, version: int = 0, leased: int = 0) -> None:
    for group_id in ids:
        replay.admit(group_id, 0, 1, 1, "actor", leased, 0.0)
    push(replay, *reversed(ids), version=version)


def train(replay: GroupManager, batch: int) -> list[int]:
    ids = [entry.id for entry in replay.serve(batch)]
    replay.finish(batch)
    return ids


def test_a_resume_with_other_settings_rolls_out_the_groups_of_later_weights_again() -> None:
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
    for again in (False, True):  # the second time by the events of the first
        replay = reborn(journal, 1)
        if not again:
            assert branch_off(replay, 1, "learner.lr=1 (was 2)") == 1
        assert {entry.id for entry in replay.store.entries.of(Stage.WAITING)} == {2, 3, 4}
        assert {entry.id for entry in replay.store.entries.of(Stage.QUEUED)} == {5}
    assert train(replay, 1) == [3, 2]


def test_an_event_that_does_not_fit_ends_the_buffer_and_is_not_taken_for_a_fault_of_a_message() -> None:
    """The journal already has the event."""
    with pytest.raises(EventError, match=r"Drop\(id=7, reason='why'\)"):
        reborn(Paper(), 0).commit(Drop(7, "why"))
    assert not issubclass(EventError, ValueError | KeyError)


def test_a_batch_that_was_trained_but_not_recorded_is_recorded_at_the_restart() -> None:
    """Otherwise a replay of the journal would end before that batch."""
    journal = Paper()
    replay = reborn(journal, 0)
    admit_and_push(replay, 0, 1)
    replay.serve(0)
    reborn(journal, 1)
    assert [record.event for record in journal.records[-2:]] == [Finish(0), Begin(1)]


def test_a_second_resume_from_further_back_undoes_more_of_the_first_process() -> None:
    """The first resume redid batch 1; the second, whose checkpoint of step 1 was lost, redoes batch 0, too."""
    journal = Paper()
    replay = reborn(journal, 0)
    admit_and_push(replay, 0, 1, 2, 3)
    planned = [train(replay, 0), train(replay, 1)]
    for next_batch in (1, 0, 0):
        replay = reborn(journal, next_batch)
        assert replay.store.counts.trained == B * next_batch
    assert [train(replay, 0), train(replay, 1)] == planned


def test_on_policy_groups_are_kept_where_the_way_there_changes_and_those_of_later_weights_redone() -> None:
    journal = Paper()
    replay = reborn(journal, 0, bound=0)
    admit_and_push(replay, 0, 1)
    train(replay, 0)
    admit_and_push(replay, 2, 3, version=1, leased=1)
    again = reborn(journal, 0, bound=0)
    again.drop(0, "malformed")
    admit_and_push(again, 4)
    assert sorted(train(again, 0)) == [1, 4]
    assert {entry.id for entry in again.store.entries.of(Stage.QUEUED)} == {2, 3}


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


def test_a_checkpoint_that_lacks_batches_of_the_snapshot_is_refused() -> None:
    """The newest checkpoint was deleted: its batches are lost, and the learner would wait forever."""
    journal = Paper()
    replay = reborn(journal, 0)
    admit_and_push(replay, 0, 1, 2, 3)
    train(replay, 0)
    train(replay, 1)
    journal.rotate(replay)
    assert reborn(journal, 2).store.counts.trained == 4
    with pytest.raises(JournalError, match="4 trained groups, but the newest checkpoint, of step 1, has 2"):
        reborn(journal, 1)


def started(run: Path, kind: str = "memory") -> tuple[int, GroupManager, Callable[[], None]]:
    """(train steps done, the state, how to end the process)."""
    replay = GroupManager(Bound(1, 2), fifo)
    options = SimpleNamespace(journal=kind, keep_journal=False)
    config = SimpleNamespace(buffer=options, checkpoint=SimpleNamespace(keep=2))
    steps, journal = main.restore(SimpleNamespace(run=run, config=config), replay)
    assert (journal is None) == (kind == "off")
    assert journal is None or journal.sync == (kind == "fsync")

    def end() -> None:
        if journal:
            journal.commit()
            journal.close()

    return steps, replay, end


@pytest.mark.parametrize("kind", ["memory", "fsync"])
def test_recorded_groups_are_there_again_and_recording_goes_on(tmp_path: Path, kind: str) -> None:
    for group_id in range(3):
        steps, replay, end = started(tmp_path, kind)
        assert steps == 0 and replay.store.counts.admitted == group_id
        held = [(entry.id, bytes(load(entry.payload))[:1]) for entry in replay.store.entries.of(Stage.WAITING)]
        assert held == [(each, bytes([each])) for each in range(group_id)]
        admit_and_push(replay, group_id)
        end()


def test_without_a_journal_nothing_is_written_and_nothing_comes_back(tmp_path: Path) -> None:
    _, replay, _ = started(tmp_path, "off")
    admit_and_push(replay, 0)
    assert not (tmp_path / "journal").exists()
    assert started(tmp_path, "off")[1].store.counts.admitted == 0


def test_a_checkpoint_without_its_journal_is_refused(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, 3, lambda folder: None, {}, keep=2)
    with pytest.raises(JournalError, match=r"checkpoint of step 3, but its journal .* is empty"):
        started(tmp_path)
    assert not (tmp_path / "journal").exists()


def test_a_payload_whose_file_is_gone_is_noticed_at_the_start(tmp_path: Path) -> None:
    """Not in the middle of training: the snapshot names a place in the segment before it."""
    _, replay, end = started(tmp_path)
    admit_and_push(replay, 0)
    end()
    _, replay, end = started(tmp_path)
    replay.record.__self__.rotate(replay.store.snapshot, replay.store.payloads())
    end()
    segments(tmp_path / "journal")[0].unlink()
    with pytest.raises(JournalError, match="payloads of active groups reach up to byte"):
        started(tmp_path)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_resume_from_a_checkpoint_serves_the_batches_since_then_again(tmp_path: Path, late: int) -> None:
    """From the newest one and, as that may be damaged, from the one before, although the journal's new segment began
    `late` train steps after it."""
    _, replay, end = started(tmp_path)
    batches, every = [], max(1, late)
    for step in range(3 * every + late):
        admit_and_push(replay, 2 * step, 2 * step + 1, version=step)
        batches.append(train(replay, step))
        saved = step + 1 - late
        if saved > 0 and saved % every == 0:
            checkpoints.write(tmp_path, saved, lambda folder: None, {}, keep=2)
            replay.record.__self__.rotate(replay.store.snapshot, replay.store.payloads(), late=late > 0)
    end()
    kept = ["000003", "000004"] if not late else ["000002", "000003", "000004"]
    assert [path.stem for path in segments(tmp_path / "journal")] == kept
    for newest in (3 * every, 2 * every):
        for _ in range(2):  # the second time with the records of the first
            steps, replay, end = started(tmp_path)
            assert (steps, replay.store.counts.trained) == (newest, 2 * newest)
            end()
        shutil.rmtree(checkpoints.folder_of(tmp_path, newest))
    checkpoints.write(tmp_path, newest, lambda folder: None, {}, keep=2)
    _, replay, end = started(tmp_path)
    held = {bytes(load(each.payload))[0] for each in replay.store.entries.of(Stage.WAITING)}
    assert held == set(range(2 * newest, 2 * len(batches)))
    again = [train(replay, step) for step in range(newest, len(batches))]
    assert again == batches[newest:] and replay.store.counts.trained == 2 * len(batches)
    end()


def test_a_batch_trained_again_behind_a_snapshot_that_has_it_survives_more_crashes(tmp_path: Path) -> None:
    """The checkpoint of step 2 is durable after step 3, so the new segment's snapshot has step 3. Then the learner ends
    twice after that step, and after the next checkpoint, before and after the segment that begins with it."""
    _, replay, end = started(tmp_path)
    for step in range(3):
        admit_and_push(replay, 2 * step, 2 * step + 1, version=step)
        ids = train(replay, step)
    checkpoints.write(tmp_path, 2, lambda folder: None, {}, keep=2)
    replay.record.__self__.rotate(replay.store.snapshot, replay.store.payloads(), late=True)
    for _ in range(2):
        end()
        steps, replay, end = started(tmp_path)
        assert (steps, train(replay, 2)) == (2, ids)
    checkpoints.write(tmp_path, 3, lambda folder: None, {}, keep=2)
    for _ in range(2):
        end()
        steps, replay, end = started(tmp_path)
        assert (steps, replay.store.counts.trained) == (3, 6)
        replay.record.__self__.rotate(replay.store.snapshot, replay.store.payloads())
    end()


def test_group_sizes_and_the_metrics_that_explain_them_survive_a_crash(tmp_path: Path) -> None:
    _, replay, end = started(tmp_path)
    scheduler, metrics = AsyncScheduler(Sagc(candidates=[4, 8])), []
    for batch in range(2):
        seen = [GroupLengths((1, 1, 1, 50), (False,) * 4)] * 5 * batch
        replay.commit(Open(batch, scheduler.open_batch(16, 0, seen), scheduler.state_dict()))
        metrics.append(scheduler.metrics())
    end()
    _, replay, end = started(tmp_path)
    again, gauges = AsyncScheduler(Sagc(candidates=[4, 8])), Gauges()
    main.restore_scheduler(again, replay, gauges)
    assert again.state_dict() == scheduler.state_dict()
    assert [gauges.decisions[batch] for batch in range(2)] == metrics and metrics[0] != metrics[1]


def trained(batch: int, *ids: int) -> list[Record]:
    """Tokens of versions before the batch's third are masked."""
    return [Record(Serve(batch, list(ids), batch // 3)), Record(Finish(batch))]


def test_recorded_batches_come_once_each_and_in_order(tmp_path: Path) -> None:
    """Batch 1 was trained, the run crashed, and it was trained again; group 3 was rolled out twice."""

    def push(group_id: int, payload: bytes) -> Record:
        return Record(Push(make_head(group_id, [(1, 2, 0, 1, 0.0)], [(0, 2)], {0: "digest"}), 0, "a"), payload)

    first = [push(0, b"0"), push(1, b"1"), *trained(0, 0, 1), push(2, b"2"), push(3, b"old"), Record(Requeue(3))]
    second = [push(3, b"3"), *trained(1, 2, 3), Record(Begin(1)), *trained(1, 2, 3), push(4, b"4"), *trained(2, 4)]
    third = [push(5, b"5"), Record(Serve(3, [5], 0))]
    write(tmp_path, [Record(Begin(0)), *map(admitted, range(6)), *first, *second, *third])
    found = [[load(payload) for _, payload in groups] for groups, _ in recorded_batches(tmp_path)]
    assert found == [[b"0", b"1"], [b"2", b"3"], [b"4"]], "batch 3 was served and never trained"
    assert count_batches(tmp_path) == 3


class Playback:
    """The replay of `count` batches of two groups of three samples. The tokens of batch 3 are of version 1."""

    def __init__(self, folder: Path, count: int, **knobs: int):
        records: list[Record] = []
        for batch in range(count):
            made = batch // 3
            rows, runs = [(1, 2, 0, 1, 0.0)] * 3, [(made, 2)] * 3
            heads = [make_head(2 * batch + at, rows, runs, {made: "digest"}) for at in range(2)]
            for head in heads:
                records += rolled_out(head, b"p" * head.size)
            records += trained(batch, *(head.id for head in heads))
        write(folder, records)
        self.router = FakeRouter()
        self.server = ReplayServer(self.router, folder, **knobs)

    def say(self, who: str, kind: str, **body: object) -> list[tuple[str, int]]:
        """(receiver, batch) of each batch that this makes the replay send."""
        before = len(self.router.sent)
        self.server.handle(who.encode(), said(kind, body))
        return [(who, body["index"]) for who, kind, body in self.router.sent[before:] if kind == "batch"]

    def report(self) -> dict:
        self.say("learner", "status")
        return self.router.sent[-1][2]["report"]


def test_a_replay_reports_the_batches_that_it_has_served_and_that_were_trained(tmp_path: Path) -> None:
    """Two steps make a version."""
    playback = Playback(tmp_path, 4, interval=2)
    playback.say("learner", "hello", role="learner", name="learner", pid=1, slots=1)
    assert playback.router.sent[-1][1] == "welcome"
    before = playback.report()
    assert not before["started"] and before["seconds"] == before["trained_seconds"] == 0.0 and before["waits"]
    assert before["ledger"] == {"admitted": 0, "trained": 0, "filtered": {}, "dropped": {}, "active": 0}
    for index in range(4):
        playback.say("learner", "want", index=index, version=index // 2)
    for index in (0, 0, 1):
        playback.say("learner", "trained", index=index)
    found = playback.report()
    assert found["started"] and found["seconds"] > 0 and found["waits"] == []
    assert found["ledger"] == {"admitted": 8, "trained": 4, "filtered": {}, "dropped": {}, "active": 4}
    assert found["staleness_max"] == 1 and found["staleness_mean"] == (0 + 0 + 1 + 0) / 4
    sent = [body for _, kind, body in playback.router.sent if kind == "batch"]
    assert [(body["version"], body["oldest_allowed"]) for body in sent] == [(0, 0), (0, 0), (1, 0), (1, 1)]


def test_a_batch_that_was_lost_on_its_way_comes_again(tmp_path: Path) -> None:
    playback = Playback(tmp_path, 3, interval=1)
    for index, comes in ((0, True), (0, True), (1, True), (1, True), (2, True), (3, False), (3, False)):
        assert playback.say("learner", "want", index=index, version=index) == [("learner", index)] * comes


def test_a_rank_gets_its_share_when_it_asks_until_the_batch_is_trained(tmp_path: Path) -> None:
    playback, ask = Playback(tmp_path, 2, interval=1, ranks=2), {"index": 0, "rank": 1}
    assert playback.say("rank-1", "want_share", **ask) == []
    assert playback.say("learner", "want", index=0, version=0) == [("learner", 0), ("rank-1", 0)]
    assert playback.say("rank-1", "want_share", **ask) == [("rank-1", 0)], "it was lost"
    assert playback.say("learner", "want", index=1, version=1) == [("learner", 1)], "the learner asks ahead"
    playback.say("learner", "trained", index=0)
    assert playback.say("rank-1", "want_share", **ask) == [], "it is trained"
    assert playback.say("rank-1", "want_share", index=1, rank=1) == [("rank-1", 1)], "this one is not"
