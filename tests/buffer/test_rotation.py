"""A new segment refers to payloads in older ones, which are deleted once no group needs them."""

import os
import random
from pathlib import Path

import pytest

from areal_like.wire.stored import Extent, Stored, load
from buffer.events import Drop, HandBack, Requeue, Snapshot
from buffer.journal import Journal, Recorded, check_payloads, reader, segments
from tests.buffer.paper import LEFT, note

MIB = 1 << 20


def names(folder: Path) -> list[int]:
    return [int(path.stem) for path in segments(folder)]


def rotate(journal: Journal, held: dict[int, Stored]) -> None:
    """Begin a segment whose snapshot names the places of these payloads."""
    journal.rotate(lambda: note({group: stored.extent for group, stored in held.items()}), list(held.values()))


@pytest.mark.parametrize("sync", [True, False])
def test_a_rotation_refers_to_payloads_and_copies_none(tmp_path: Path, sync: bool) -> None:
    journal = Journal(tmp_path, sync=sync, keep=False)
    held = {number: journal.append(HandBack(number, LEFT), bytes([number]) * MIB) for number in range(4)}
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
    held = {0: journal.append(HandBack(0, LEFT), b"x" * 1000)}
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
    assert [record.event for record in Recorded(tmp_path)] == [HandBack(0, LEFT), Requeue(1)]
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
                held[number] = journal.append(HandBack(number, LEFT), data), data  # type: ignore[assignment]
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
            case HandBack():
                found[event.id] = payload  # type: ignore[assignment]
            case Drop():
                del found[event.id]
    return found
