"""What a crash tears is cut off; what no crash can have torn is an error, and nothing durable is hidden or lost."""

from pathlib import Path

import pytest

from buffer import journal as module
from buffer.journal import Journal, JournalError, since_snapshot


def write(folder: Path, sync: bool, records: int = 10, size: int = 20_000) -> Path:
    journal = Journal(folder, sync=sync, keep=False)
    for number in range(records):
        journal.append("admit", [number, number, 8, 8], bytes([number]) * size)
        journal.commit()
    journal.close()
    return module.segments(folder)[0]


@pytest.mark.parametrize("sync", [True, False])
def test_damage_with_durable_records_behind_it_is_an_error_and_changes_nothing(tmp_path: Path, sync: bool) -> None:
    path = write(tmp_path, sync)
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"damaged at byte \d+ .* records follow that were written later"):
        list(since_snapshot(tmp_path, repair=True))
    assert path.read_bytes() == bytes(data)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("lost", [1, 700, 15_000])
def test_what_was_written_last_may_be_torn(tmp_path: Path, sync: bool, lost: int) -> None:
    path = write(tmp_path, sync)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 5_000 * sync - lost])  # into the last record: padding is at most 4 KB
    assert [record.fields[0] for record in since_snapshot(tmp_path, repair=True)] == list(range(9))
    again = Journal(tmp_path, sync=sync, keep=False)
    again.append("drop", [1, "why"])
    again.commit()
    again.close()
    assert [record.kind for record in since_snapshot(tmp_path)] == ["admit"] * 9 + ["drop"]


def test_blocks_of_the_last_append_may_have_reached_the_disk_in_any_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path, sync=True, keep=False)
    journal.append("admit", [0, 0, 8, 8])
    journal.commit()
    durable = module.segments(tmp_path)[0].stat().st_size
    for number in range(1, 9):
        journal.append("admit", [number, number, 8, 8], b"x" * 10_000)
    journal.commit()  # one append: a power cut may leave its end without its beginning
    journal.close()
    path = module.segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[durable : durable + 8192] = bytes(8192)
    path.write_bytes(data)
    assert [record.fields[0] for record in since_snapshot(tmp_path, repair=True)] == [0]


def test_a_new_segment_that_fails_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, sync=True, keep=False)
    journal.append("admit", [0, 0, 8, 8])
    with monkeypatch.context() as patch:
        patch.setattr(module, "sync_folder", lambda folder: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        with pytest.raises(OSError, match="Too many"):
            journal.rotate(lambda: [1])
    journal.append("admit", [1, 1, 8, 8])
    journal.commit()
    assert [record.fields[0] for record in since_snapshot(tmp_path)] == [0, 1]
    journal.rotate(lambda: [2])
    journal.append("admit", [2, 2, 8, 8])
    journal.commit()
    journal.close()
    assert [record.kind for record in since_snapshot(tmp_path)] == ["snapshot", "admit"]


def test_a_segment_that_is_being_written_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, sync=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30_000])
    real = module.written_later

    def meanwhile(where: Path, start: int, size: int) -> bool:
        where.write_bytes(whole)  # the rest comes while somebody reads
        return real(where, start, size)

    monkeypatch.setattr(module, "written_later", meanwhile)
    assert len(list(since_snapshot(tmp_path))) == 8
