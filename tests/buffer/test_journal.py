"""The journal on a real disk: committed records are read back, wherever the file was cut off. The end of a write that a
crash has torn is cut; damage of a snapshot, of a payload or of an earlier record is an error."""

import errno
import os
import random
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.wire.stored import Extent, Stored, load
from buffer import journal as module
from buffer import segment_file
from buffer.events import Drop, Open, Requeue, Settle, Snapshot
from buffer.journal import Journal, JournalError, Record, Recorded, check_payloads, reader, scan, segments
from buffer.replay_server import count_batches
from scripts.ledger import Books
from tests.buffer.paper import note

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


def write(folder: Path, records: list[Record], sync: bool = False, at_once: bool = True) -> Path:
    """Append the records, in one commit or in one each. Returns the newest file."""
    journal = Journal(folder, sync=sync, keep=False)
    for record in records:
        journal.append(*record)
        if not at_once:
            journal.commit()
    journal.commit()
    journal.close()
    return segments(folder)[-1]


def resume(folder: Path) -> list[Record]:
    return loaded(Recorded(folder, repair=True, check=True))


def flip(path: Path, at: int, bit: int = 0) -> bytes:
    """Flip a bit of a byte. Returns the file's bytes."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return bytes(data)


@settings(max_examples=80, deadline=None)
@given(RECORDS.filter(bool), st.booleans(), st.data())
def test_a_torn_tail_is_cut_and_writing_goes_on(tmp_path_factory, records, sync, data) -> None:
    """For any byte that the crash stopped at: a prefix of the records survives, and new ones follow it."""
    folder = tmp_path_factory.mktemp("journal")
    path = write(folder, records, sync)
    assert loaded(scan(folder)) == records
    os.truncate(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    kept = resume(folder)
    assert kept == records[: len(kept)] and len(kept) < len(records)
    write(folder, [Record(Drop(1, "more"))])
    assert loaded(scan(folder)) == [*kept, Record(Drop(1, "more"))]


@settings(max_examples=80, deadline=None)
@given(RECORDS.filter(bool), st.data())
def test_a_flipped_bit_never_gives_a_record_that_was_not_written(tmp_path_factory, records, data) -> None:
    folder = tmp_path_factory.mktemp("journal")
    path = write(folder, records)
    raw = flip(path, data.draw(st.integers(0, path.stat().st_size - 1)), data.draw(st.integers(0, 7)))
    try:
        kept = loaded(scan(folder))
    except JournalError:
        assert path.read_bytes() == raw  # whole records follow, or it can be taken for another format
    else:
        assert kept == records[: len(kept)]


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("place", [0, 21, 42, 56])
def test_a_damaged_record_before_intact_ones_is_an_error(tmp_path: Path, sync: bool, place: int) -> None:
    """Head, fields or payload of a record in the middle: nothing durable is cut off."""
    records = [Record(Requeue(number), bytes([number]) * 20_000) for number in range(3)]
    path = write(tmp_path, records, sync, at_once=False)
    data = flip(path, path.read_bytes().index(segment_file._MARK, 100) + place, 7)
    with pytest.raises(JournalError, match=r"damaged at byte \d+"):
        resume(tmp_path)
    assert path.read_bytes() == data


def test_the_end_of_the_last_append_may_be_on_disk_without_its_beginning(tmp_path: Path) -> None:
    durable = write(tmp_path, [Record(Requeue(0))], sync=True).stat().st_size
    path = write(tmp_path, [Record(Requeue(number), b"x" * 10_000) for number in range(1, 9)], sync=True)
    data = path.read_bytes()  # a power cut has torn the one append
    path.write_bytes(data[:durable] + bytes(8192) + data[durable + 8192 :])
    assert [record.event.id for record in resume(tmp_path)] == [0]


def test_a_payload_that_looks_like_records_proves_nothing(tmp_path: Path) -> None:
    """A record fits only its own place, so a payload may be part of a journal."""
    many = [Record(Requeue(number), b"x" * 2000) for number in range(10)]
    earlier = write(tmp_path / "earlier", many, at_once=False).read_bytes()
    path = write(tmp_path / "now", [Record(Requeue(0), earlier)] * 2)
    os.truncate(path, path.stat().st_size - 100)
    assert len(resume(tmp_path / "now")) == 1


def test_damage_before_the_newest_segment_is_an_error(tmp_path: Path) -> None:
    journal = Journal(tmp_path, sync=False, keep=True)
    journal.append(Requeue(1))
    journal.rotate(lambda: note("state"))
    journal.close()
    os.truncate(segments(tmp_path)[0], 20)
    with pytest.raises(JournalError, match="damaged at byte 17"):
        loaded(scan(tmp_path))


@pytest.mark.parametrize("at", [3, 20, 60])
def test_a_segment_whose_snapshot_is_damaged_is_never_cut_off(tmp_path: Path, at: int) -> None:
    """The snapshot was on disk before the segment got its name."""
    journal = Journal(tmp_path, sync=False, keep=False)
    journal.rotate(lambda: note(list(range(100))))
    journal.close()
    (path,) = segments(tmp_path)
    flip(path, at)
    with pytest.raises(JournalError):
        resume(tmp_path)
    os.truncate(path, at)
    with pytest.raises(JournalError, match="snapshot was"):
        resume(tmp_path)
    assert path.stat().st_size == at


def test_a_payload_that_is_damaged_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path, sync=False, keep=False)
    held = journal.append(Requeue(0), b"x" * 1000)
    journal.rotate(lambda: note(held.extent), [held])
    journal.close()
    first = segments(tmp_path)[0]
    flip(first, -1)
    (snapshot,) = Recorded(tmp_path)
    extent = Extent(*snapshot.event.scheduler)
    with pytest.raises(JournalError, match=r"000001\.wal is damaged: the payload of 1000 bytes at byte \d+"):
        reader(tmp_path)(extent)
    os.truncate(first, 500)
    with pytest.raises(JournalError, match=r"000001\.wal has 500 bytes, but payloads of active groups reach up to"):
        check_payloads(tmp_path, [Stored(reader(tmp_path), extent=extent)])


@pytest.mark.parametrize("what", ["MAX_FIELDS_BYTES", "MAX_PAYLOAD_BYTES"])
def test_a_record_that_no_reader_would_take_is_not_written(tmp_path: Path, monkeypatch, what: str) -> None:
    monkeypatch.setattr(segment_file, what, 1000)
    journal = Journal(tmp_path, sync=False, keep=False)
    journal.append(Requeue(1), bytes(900))
    with pytest.raises(JournalError, match="expected at most 1000"):
        journal.append(Drop(1, "x" * 1001), bytes(1001))
    journal.append(Requeue(1))
    journal.commit()
    journal.close()
    assert [record.event for record in scan(tmp_path)][-1] == Requeue(1)


@pytest.mark.parametrize("use", [resume, count_batches, lambda folder: Books().read(Recorded(folder, whole=True))])
@pytest.mark.parametrize("number", [1, 9, segment_file.FORMAT + 1])
def test_a_journal_of_another_format_is_refused_in_one_sentence_and_left_alone(tmp_path: Path, use, number) -> None:
    path, data = tmp_path / "000001.wal", b"areal-journal-%d\nwhatever" % number
    path.write_bytes(data)
    with pytest.raises(JournalError, match=f"got areal-journal-{number}, expected areal-journal-"):
        use(tmp_path)
    assert path.read_bytes() == data


def test_a_record_that_is_no_event_of_ours_is_refused_and_not_taken_for_damage(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("buffer.journal.encode", lambda event: msgpack.packb(["admit", 1, "of another version"]))
    before = write(tmp_path, [Record(Requeue(1))]).read_bytes()
    with pytest.raises(JournalError, match="another version of this program"):
        resume(tmp_path)
    assert segments(tmp_path)[0].read_bytes() == before


def test_a_journal_without_its_beginning_is_not_replayed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, sync=False, keep=False)
    journal.rotate(lambda: note("state"))
    journal.close()
    with pytest.raises(JournalError, match="keep_journal"):
        count_batches(tmp_path)


def test_a_full_disk_leaves_the_file_whole_and_the_records_waiting(tmp_path: Path, monkeypatch) -> None:
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
    journal.append(Requeue(3), b"payload")
    monkeypatch.setattr(os, "writev", half_then_full)
    with pytest.raises(OSError, match="No space"):
        journal.commit()
    monkeypatch.setattr(os, "writev", real)
    assert loaded(scan(tmp_path)) == [Record(Requeue(1))]
    journal.commit()
    assert loaded(scan(tmp_path)) == [Record(Requeue(1)), Record(Requeue(2)), Record(Requeue(3), b"payload")]


def test_a_write_in_the_background_counts_once_the_disk_has_it(tmp_path: Path, monkeypatch) -> None:
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


def test_a_new_segment_that_fails_hides_nothing(tmp_path: Path, monkeypatch) -> None:
    journal = Journal(tmp_path, sync=True, keep=False)
    journal.append(Requeue(0))
    with monkeypatch.context() as patch:
        patch.setattr(module, "sync_folder", lambda folder: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        with pytest.raises(OSError, match="Too many"):
            journal.rotate(lambda: note(1))
    journal.append(Requeue(1))
    journal.commit()
    assert [record.event.id for record in Recorded(tmp_path)] == [0, 1]
    journal.rotate(lambda: note(2))
    journal.append(Requeue(2))
    journal.commit()
    journal.close()
    assert [record.event for record in Recorded(tmp_path)] == [note(2), Requeue(2)]


MIB = 1 << 20


def names(folder: Path) -> list[int]:
    return [int(path.stem) for path in segments(folder)]


def rotate(journal: Journal, held: dict[int, Stored]) -> None:
    """Begin a segment whose snapshot names the places of these payloads."""
    journal.rotate(lambda: note({group: stored.extent for group, stored in held.items()}), list(held.values()))


@pytest.mark.parametrize("sync", [True, False])
def test_a_rotation_refers_to_payloads_and_copies_none(tmp_path: Path, sync: bool) -> None:
    journal = Journal(tmp_path, sync=sync, keep=False)
    held = {number: journal.append(Requeue(number), bytes([number]) * MIB) for number in range(4)}
    journal.commit()
    for _ in range(3):
        rotate(journal, held)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4 * MIB + 20_000 and names(tmp_path) == [1, 4]
    assert {group: load(stored) for group, stored in replayed(tmp_path).items()} == {n: bytes([n]) * MIB for n in held}
    rotate(journal, {})
    assert names(tmp_path) == [5], "nobody holds anything in the first one any more"
    journal.close()


def test_old_segments_stay_until_the_new_one_has_been_read_back(tmp_path: Path, monkeypatch) -> None:
    """A disk that accepts everything and stores something else."""
    journal = Journal(tmp_path, sync=False, keep=False)
    held = {0: journal.append(Requeue(0), b"x" * 1000)}
    real = os.fdatasync

    def fdatasync(file: int) -> None:
        real(file)
        path = f"/proc/self/fd/{file}"
        if os.readlink(path).endswith("next.tmp"):
            with open(path, "r+b") as again:
                again.seek(-3, os.SEEK_END)
                again.write(b"???")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fdatasync)
        with pytest.raises(OSError, match="reads back with other bytes"):
            rotate(journal, held)
    journal.append(Requeue(1))
    journal.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["000001.wal"]
    assert [record.event for record in Recorded(tmp_path)] == [Requeue(0), Requeue(1)]
    journal.close()


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_held_is_there_after_any_history(tmp_path: Path, seed: int, sync: bool) -> None:
    """Payloads come and go, segments are rotated, and sometimes the process crashes and leaves a torn tail."""
    dice = random.Random(seed)
    journal, folder = Journal(tmp_path, sync=sync, keep=False), tmp_path
    held: dict[int, tuple[Stored, bytes]] = {}
    number = 0
    for _ in range(120):
        match dice.choice(["push"] * 4 + ["leave"] * 3 + ["commit", "rotate", "die"]):
            case "push":
                data = dice.randbytes(dice.randint(1, 2000))
                held[number] = journal.append(Requeue(number), data), data  # type: ignore[assignment]
                number += 1
            case "leave" if held:
                group = dice.choice(list(held))
                del held[group]
                journal.append(Drop(group, "left"))
            case "commit":
                journal.commit()
            case "rotate":
                mine = {group: stored for group, (stored, _) in held.items()}
                rotate(journal, mine)
                assert set(names(folder)[:-1]) <= {stored.extent.segment for stored in mine.values()}
            case "die":
                journal.commit()
                journal.close()
                with segments(folder)[-1].open("ab") as file:
                    file.write(dice.randbytes(dice.randint(0, 30)))
                back = replayed(folder)
                check_payloads(folder, back.values())
                assert {group: load(stored) for group, stored in back.items()} == {
                    group: data for group, (_, data) in held.items()
                }
                held = {group: (stored, held[group][1]) for group, stored in back.items()}
                journal = Journal(folder, sync=sync, keep=False)
    journal.close()


def replayed(folder: Path) -> dict[int, Stored]:
    found: dict[int, Stored] = {}
    for event, payload in Recorded(folder, repair=True, check=True):
        match event:
            case Snapshot():
                extents = event.scheduler.items()
                found = {group: Stored(reader(folder), extent=Extent(*extent)) for group, extent in extents}
            case Requeue():
                found[event.id] = payload  # type: ignore[assignment]
            case Drop():
                del found[event.id]
    return found
