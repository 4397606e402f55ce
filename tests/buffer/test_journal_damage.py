"""What a crash can tear is cut off; damage of a snapshot, of a payload or of an earlier segment is an error."""

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from areal_like.wire.messages import PartialHead
from buffer import journal as module
from buffer import segment_file
from buffer.events import Drop, HandBack, Requeue
from buffer.journal import Journal, JournalError, scan, since_snapshot
from buffer.segment_file import Extent, Stored
from tests.buffer.paper import LEFT, note


def write(folder: Path, sync: bool, records: int = 10, size: int = 20_000) -> Path:
    journal = Journal(folder, sync=sync, keep=False)
    for number in range(records):
        journal.append(HandBack(number, LEFT), bytes([number]) * size)
        journal.commit()
    journal.close()
    return module.segments(folder)[0]


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("place", range(0, 60, 7))
def test_a_damaged_record_before_intact_ones_is_an_error(tmp_path: Path, sync: bool, place: int) -> None:
    """Head, fields or payload of a record in the middle: nothing durable is cut off."""
    path = write(tmp_path, sync, records=3)
    data = bytearray(path.read_bytes())
    data[data.index(segment_file._MARK, 100) + place] ^= 0x80
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"damaged at byte \d+"):
        list(since_snapshot(tmp_path, repair=True))
    assert path.read_bytes() == bytes(data)


def test_the_end_of_the_last_append_may_be_on_disk_without_its_beginning(tmp_path: Path) -> None:
    journal = Journal(tmp_path, sync=True, keep=False)
    journal.append(HandBack(0, LEFT))
    journal.commit()
    path = module.segments(tmp_path)[0]
    durable = path.stat().st_size
    for number in range(1, 9):
        journal.append(HandBack(number, LEFT), b"x" * 10_000)
    journal.commit()  # one append, torn by a power cut
    journal.close()
    data = bytearray(path.read_bytes())
    data[durable : durable + 8192] = bytes(8192)
    path.write_bytes(data)
    assert [record.event.id for record in since_snapshot(tmp_path, repair=True)] == [0]


def test_a_payload_that_looks_like_records_proves_nothing(tmp_path: Path) -> None:
    """A record fits only its own place, so a payload may be part of a journal."""
    earlier = write(tmp_path / "earlier", sync=False).read_bytes()
    journal = Journal(tmp_path / "now", sync=False, keep=False)
    for _ in range(2):
        journal.append(HandBack(0, LEFT), earlier)
    journal.commit()
    journal.close()
    (path,) = module.segments(tmp_path / "now")
    path.write_bytes(path.read_bytes()[:-100])
    assert len(list(since_snapshot(tmp_path / "now", repair=True))) == 1


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("lost", [1, 700, 15_000])
def test_what_was_written_last_may_be_torn(tmp_path: Path, sync: bool, lost: int) -> None:
    path = write(tmp_path, sync)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - lost])
    assert [record.event.id for record in since_snapshot(tmp_path, repair=True)] == list(range(9))
    again = Journal(tmp_path, sync=sync, keep=False)
    again.append(Drop(1, "why"))
    again.commit()
    again.close()
    assert [type(record.event) for record in since_snapshot(tmp_path)] == [HandBack] * 9 + [Drop]


def test_a_new_segment_that_fails_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, sync=True, keep=False)
    journal.append(HandBack(0, LEFT))
    with monkeypatch.context() as patch:
        patch.setattr(module, "sync", lambda folder: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        with pytest.raises(OSError, match="Too many"):
            journal.rotate(lambda: note(1))
    journal.append(HandBack(1, LEFT))
    journal.commit()
    assert [record.event.id for record in since_snapshot(tmp_path)] == [0, 1]
    journal.rotate(lambda: note(2))
    journal.append(HandBack(2, LEFT))
    journal.commit()
    journal.close()
    assert [record.event for record in since_snapshot(tmp_path)] == [note(2), HandBack(2, LEFT)]


@pytest.mark.parametrize("at", [3, 20, 60])
def test_a_segment_whose_snapshot_is_damaged_is_never_cut_off(tmp_path: Path, at: int) -> None:
    """The snapshot was on disk before the segment got its name."""
    journal = Journal(tmp_path, sync=False, keep=False)
    journal.rotate(lambda: note(list(range(100))))
    journal.close()
    (path,) = module.segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"snapshot was|another version|another"):
        list(since_snapshot(tmp_path, repair=True))
    os.truncate(path, at)
    with pytest.raises(JournalError, match="snapshot was"):
        list(since_snapshot(tmp_path, repair=True))
    assert path.stat().st_size == at


@pytest.mark.parametrize("what", ["MAX_FIELDS_BYTES", "MAX_PAYLOAD_BYTES"])
def test_a_record_that_no_reader_would_take_is_not_written(tmp_path: Path, monkeypatch, what: str) -> None:
    monkeypatch.setattr(segment_file, what, 1000)
    journal = Journal(tmp_path, sync=False, keep=False)
    journal.append(HandBack(1, LEFT), bytes(900))
    with pytest.raises(JournalError, match="expected at most 1000"):
        journal.append(HandBack(1, PartialHead(1, b"x" * 1001, b"", b"", {})), bytes(1001))
    with pytest.raises(JournalError, match="fields: got") if "FIELDS" in what else nullcontext():
        journal.rotate(lambda: note("x" * 1001))
    journal.append(Requeue(1))
    journal.commit()
    journal.close()
    assert [record.event for record in scan(tmp_path)][-1] == Requeue(1)


def test_a_payload_that_is_damaged_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path, sync=False, keep=False)
    held = journal.append(HandBack(0, LEFT), b"x" * 1000)
    journal.rotate(lambda: note(held.extent), [held])
    journal.close()
    first = module.segments(tmp_path)[0]
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    (snapshot,) = since_snapshot(tmp_path)
    with pytest.raises(JournalError, match=r"000001\.wal is damaged: the payload of 1000 bytes at byte \d+"):
        module.reader(tmp_path)(Extent(*snapshot.event.scheduler))
    os.truncate(first, 500)
    with pytest.raises(JournalError, match=r"000001\.wal has 500 bytes, but payloads of active groups reach up to"):
        module.check_payloads(tmp_path, [Stored(module.reader(tmp_path), extent=Extent(*snapshot.event.scheduler))])
