"""The journal on a real disk: committed records are read back, wherever the file was cut off."""

import errno
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.wire.groups import make_head
from buffer.events import Begin, Drop, Finish, HandBack, Open, Push, Requeue, Serve, Settle
from buffer.journal import Journal, JournalError, Record, Recorded, scan, segments, since_snapshot
from buffer.prompts import PromptCursor
from buffer.replay_server import ReplayServer, count_batches, recorded_batches
from buffer.segment_file import load
from buffer.staleness import Bound
from scripts.ledger import Audit, Books
from tests.buffer.house import FakeRouter, said
from tests.buffer.paper import LEFT, admitted, note, rolled_out

RECORDS = st.lists(
    st.builds(
        Record,
        st.builds(Drop, st.integers(-(2**60), 2**60), st.text(max_size=5))
        | st.builds(Settle, st.dictionaries(st.integers(0, 9), st.integers(0, 2**40), max_size=4), st.integers(0, 9))
        | st.builds(Open, st.integers(0, 9), st.integers(1, 9), st.none() | st.floats(allow_nan=False)),
        st.binary(max_size=200),
    ),
    max_size=8,
)


def loaded(records: Iterable[Record]) -> list[Record]:
    """All records with their payloads."""
    return [Record(event, load(payload)) for event, payload in records]


def write(folder: Path, records: list[Record], **knobs: bool) -> None:
    journal = Journal(folder, **{"sync": False, "keep": False, **knobs})
    for record in records:
        journal.append(*record)
    journal.commit()
    journal.close()


@settings(max_examples=60, deadline=None)
@given(RECORDS, RECORDS, st.booleans())
def test_what_was_committed_comes_back_in_order(tmp_path_factory, first, second, sync: bool) -> None:
    folder = tmp_path_factory.mktemp("journal")
    write(folder, first, sync=sync)
    write(folder, second, sync=sync)
    assert loaded(scan(folder)) == first + second


@settings(max_examples=80, deadline=None)
@given(RECORDS.filter(bool), st.data())
def test_a_torn_tail_is_cut_and_writing_goes_on(tmp_path_factory, records, data) -> None:
    """For any byte that the crash stopped at: a prefix of the records survives, and new ones follow it."""
    folder = tmp_path_factory.mktemp("journal")
    write(folder, records)
    (path,) = segments(folder)
    os.truncate(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    kept = loaded(scan(folder, repair=True))
    assert kept == records[: len(kept)] and len(kept) < len(records)
    write(folder, [Record(Drop(1, "more"))])
    assert loaded(scan(folder)) == [*kept, Record(Drop(1, "more"))]


@settings(max_examples=80, deadline=None)
@given(RECORDS.filter(bool), st.data())
def test_a_flipped_bit_never_gives_a_record_that_was_not_written(tmp_path_factory, records, data) -> None:
    folder = tmp_path_factory.mktemp("journal")
    write(folder, records)
    (path,) = segments(folder)
    raw = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    try:
        kept = loaded(scan(folder))
    except JournalError:
        assert path.read_bytes() == bytes(raw)  # whole records follow, or it can be taken for another format
    else:
        assert kept == records[: len(kept)]


def test_damage_before_the_newest_segment_is_an_error(tmp_path: Path) -> None:
    journal = Journal(tmp_path, sync=False, keep=True)
    journal.append(Requeue(1))
    journal.rotate(lambda: note("state"))
    journal.close()
    os.truncate(segments(tmp_path)[0], 20)
    with pytest.raises(JournalError, match="damaged at byte 17"):
        loaded(scan(tmp_path))


def test_a_full_disk_leaves_the_file_whole_and_the_records_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, sync=False, keep=False)
    journal.append(Requeue(1))
    journal.commit()
    real, calls = os.writev, []

    def half_then_full(file: int, views: list[memoryview]) -> int:
        """Write half of the data; then the disk is full."""
        calls.append(file)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, [views[0][: len(views[0]) // 2]])

    journal.append(Requeue(2))
    journal.append(HandBack(3, LEFT), b"payload")
    monkeypatch.setattr(os, "writev", half_then_full)
    with pytest.raises(OSError, match="No space"):
        journal.commit()
    monkeypatch.setattr(os, "writev", real)
    assert loaded(scan(tmp_path)) == [Record(Requeue(1))]
    journal.commit()
    assert loaded(scan(tmp_path)) == [Record(Requeue(1)), Record(Requeue(2)), Record(HandBack(3, LEFT), b"payload")]


def test_what_is_written_in_the_background_counts_once_the_disk_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, sync=True, keep=False)
    disk_has_it, real = threading.Event(), os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: disk_has_it.wait(30) and real(file))
    journal.append(Requeue(1))
    assert journal.advance() == 0 and journal.busy
    journal.append(Requeue(2))
    assert journal.advance() == 0, "nothing is durable before the disk has it"
    disk_has_it.set()
    while (durable := journal.advance()) == 0:
        time.sleep(0.001)
    assert durable == 1, "the second record came after that write had begun"
    journal.commit()
    assert journal.advance() == 2 and not journal.busy
    assert loaded(scan(tmp_path)) == [Record(Requeue(1)), Record(Requeue(2))]


def test_a_full_disk_in_the_background_leaves_the_records_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, sync=True, keep=False)
    real, full = os.fdatasync, True

    def sync(file: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file)

    monkeypatch.setattr(os, "fdatasync", sync)
    journal.append(Requeue(1))
    journal.advance()
    journal.append(Requeue(2))
    with pytest.raises(OSError, match="No space"):
        while True:
            journal.advance()
    full = False
    journal.commit()
    assert loaded(scan(tmp_path)) == [Record(Requeue(1)), Record(Requeue(2))]


def test_recorded_batches_come_once_each_and_in_order(tmp_path: Path) -> None:
    """Batch 1 was trained, the run crashed, and it was trained again; group 3 was rolled out twice."""

    def push(group_id: int, payload: bytes) -> Record:
        head = make_head(group_id, [(1, 2, 0, 1, 0.0)], [(0, 2)], {0: "digest"})
        return Record(Push(head, 0, "a"), payload)

    def train(batch: int, *ids: int) -> list[Record]:
        return [Record(Serve(batch, list(ids), 0)), Record(Finish(batch))]

    first = [push(0, b"0"), push(1, b"1"), *train(0, 0, 1), push(2, b"2"), push(3, b"old"), Record(Requeue(3))]
    second = [push(3, b"3"), *train(1, 2, 3), Record(Begin(1)), *train(1, 2, 3), push(4, b"4"), *train(2, 4)]
    third = [push(5, b"5"), Record(Serve(3, [5], 0))]
    write(tmp_path, [Record(Begin(0)), *map(admitted, range(6)), *first, *second, *third])
    found = [[load(payload) for _, payload in groups] for groups, _ in recorded_batches(tmp_path)]
    assert found == [[b"0", b"1"], [b"2", b"3"], [b"4"]], "batch 3 was served and never trained"
    assert count_batches(tmp_path) == 3


def test_a_replay_serves_a_batch_again_that_was_lost_on_its_way(tmp_path: Path) -> None:
    records = []
    for group_id in range(3):
        head = make_head(group_id, [(1, 2, 0, 1, 0.0)], [(0, 2)], {0: "digest"})
        records += [*rolled_out(head, b"p"), Record(Serve(group_id, [group_id], 0)), Record(Finish(group_id))]
    write(tmp_path, records)
    router = FakeRouter()
    for index in (0, 0, 1, 1, 2, 3, 3):
        router.incoming.append((b"learner", said("want", {"index": index, "version": index})))
    playback = ReplayServer(router, tmp_path, 1)
    while received := router.receive(0):
        playback.handle(*received)
    assert [body["index"] for _, kind, body in router.sent if kind == "batch"] == [0, 0, 1, 1, 2]
    assert [body["table"]["groups"][0][0] for _, kind, body in router.sent if kind == "batch"] == [0, 0, 1, 1, 2]


def resume(folder: Path) -> None:
    list(since_snapshot(folder, repair=True))


def count(folder: Path) -> None:
    Books().read(Recorded(folder, whole=True))


def audit(folder: Path) -> None:
    Audit(PromptCursor(9, 0), Bound(1, 4)).read(Recorded(folder, whole=True))


@pytest.mark.parametrize("use", [resume, count_batches, count, audit])
def test_a_journal_of_another_format_is_refused_in_one_sentence_and_left_alone(tmp_path: Path, use) -> None:
    path = tmp_path / "000001.wal"
    for number in (1, 9, 11):
        data = b"areal-journal-%d\nwhatever" % number
        path.write_bytes(data)
        with pytest.raises(JournalError, match=f"got areal-journal-{number}, expected areal-journal-"):
            use(tmp_path)
        assert path.read_bytes() == data


def test_a_record_that_is_no_event_of_ours_is_refused_and_not_taken_for_damage(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("buffer.journal.encode", lambda event: msgpack.packb(["admit", 1, "of another version"]))
    write(tmp_path, [Record(Requeue(1))])
    before = segments(tmp_path)[0].read_bytes()
    with pytest.raises(JournalError, match="another version of this program"):
        resume(tmp_path)
    assert segments(tmp_path)[0].read_bytes() == before


def test_a_journal_without_its_beginning_is_not_replayed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, sync=False, keep=False)
    journal.rotate(lambda: note("state"))
    journal.close()
    with pytest.raises(JournalError, match="keep_journal"):
        count_batches(tmp_path)
