"""A buffer that starts again: the files that it requires from the earlier one, and the error if they are missing."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_like.run import checkpoints
from areal_like.wire.groups import make_head
from buffer import main
from buffer.gauges import Gauges
from buffer.groups import GroupManager
from buffer.journal import JournalError, segments
from buffer.policies import fifo
from buffer.schedulers import AsyncScheduler
from buffer.segment_file import load
from buffer.sizing import GroupLengths, Sagc
from buffer.staleness import Bound
from buffer.store import Stage


def started(run: Path, kind: str = "memory") -> tuple[int, GroupManager, Callable[[], None]]:
    """(train steps done, what is held, how to end the process)."""
    replay = GroupManager(Bound(1, 2), fifo)
    options = SimpleNamespace(journal=kind, keep_journal=False)
    steps, journal = main.restore(SimpleNamespace(run=run, config=SimpleNamespace(buffer=options)), replay)
    assert (journal is None) == (kind == "off")
    assert journal is None or journal.sync == (kind == "fsync")

    def end() -> None:
        if journal:
            journal.commit()
            journal.close()

    return steps, replay, end


def push(replay: GroupManager, group_id: int) -> None:
    replay.admit(group_id, group_id, 1, 1, "actor", 0, 0.0)
    head = make_head(group_id, [(1, 2, 0, 1, 0.0)], [(0, 2)], {0: "d0"})
    assert replay.push(head, bytes([group_id]) * head.size, 0, 0.0)


@pytest.mark.parametrize("kind", ["memory", "fsync"])
def test_what_was_recorded_is_there_again_and_recording_goes_on(tmp_path: Path, kind: str) -> None:
    for group_id in range(3):
        steps, replay, end = started(tmp_path, kind)
        assert steps == 0 and replay.store.admitted == group_id
        held = [(entry.id, bytes(load(entry.payload))[:1]) for entry in replay.store.of(Stage.WAITING)]
        assert held == [(each, bytes([each])) for each in range(group_id)]
        push(replay, group_id)
        end()


def test_without_a_journal_nothing_is_written_and_nothing_comes_back(tmp_path: Path) -> None:
    _, replay, _ = started(tmp_path, "off")
    push(replay, 0)
    assert not (tmp_path / "journal").exists()
    assert started(tmp_path, "off")[1].store.admitted == 0


def test_a_checkpoint_without_its_journal_is_refused(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, 3, lambda folder: None, {}, keep=2)
    with pytest.raises(JournalError, match=r"checkpoint of step 3, but its journal .* is empty"):
        started(tmp_path)
    assert not (tmp_path / "journal").exists()


def test_a_payload_whose_file_is_gone_is_noticed_at_the_start(tmp_path: Path) -> None:
    """Not in the middle of training: the snapshot names a place in the segment before it."""
    _, replay, end = started(tmp_path)
    push(replay, 0)
    end()
    _, replay, end = started(tmp_path)
    journal = replay.record.__self__
    journal.rotate(replay.store.snapshot, replay.store.payloads())
    end()
    first, _ = segments(tmp_path / "journal")
    first.unlink()
    with pytest.raises(JournalError, match="payloads of active groups reach up to byte"):
        started(tmp_path)


def test_group_sizes_and_what_explains_them_are_those_of_before(tmp_path: Path) -> None:
    def restored(replay: GroupManager) -> tuple[object, list[dict[str, float]]]:
        scheduler, gauges = sized(), Gauges()
        main.restore_scheduler(scheduler, replay, gauges)
        return scheduler.state_dict(), [gauges.decision(batch) for batch in range(2)]

    def sized() -> AsyncScheduler:
        return AsyncScheduler(Sagc(candidates=[4, 8]))

    _, replay, end = started(tmp_path)
    scheduler, told = sized(), []
    for batch in range(2):
        seen = [GroupLengths((1, 1, 1, 50), (False,) * 4)] * 5 * batch
        replay.open_batch(scheduler.open_batch(16, 0, seen), scheduler.state_dict())
        told.append(scheduler.metrics())
    end()
    _, replay, end = started(tmp_path)
    assert restored(replay) == (scheduler.state_dict(), told) and told[0] != told[1]
