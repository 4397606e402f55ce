"""A new segment refers to payloads in older ones, which are deleted once no group needs them. Memory does not grow with
the journal, neither in a resume nor in a replay."""

import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from areal_like.wire.groups import Head, make_head
from buffer.events import Drop, HandBack, Requeue, Snapshot
from buffer.journal import Journal, check_payloads, reader, segments, since_snapshot
from buffer.segment_file import Extent, Stored, load
from tests.buffer.paper import LEFT, note

MIB = 1 << 20


def names(folder: Path) -> list[int]:
    return [int(path.stem) for path in segments(folder)]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def refer(held: list[Stored]) -> Callable[[], Snapshot]:
    """A snapshot that names the places of these payloads."""
    return lambda: note([each.extent for each in held])


def reread(folder: Path) -> list[bytes]:
    """Read the payloads that the newest snapshot names."""
    first = next(iter(since_snapshot(folder)))
    return [reader(folder)(Extent(*extent)) for extent in first.event.scheduler]


@pytest.mark.parametrize("sync", [True, False])
def test_a_rotation_refers_to_payloads_and_copies_none(tmp_path: Path, sync: bool) -> None:
    journal = Journal(tmp_path, sync=sync, keep=False)
    held = [journal.append(HandBack(number, LEFT), bytes([number]) * MIB) for number in range(4)]
    journal.commit()
    before = size(tmp_path)
    for _ in range(3):
        journal.rotate(refer(held), held)
    assert size(tmp_path) < before + 20_000 and names(tmp_path) == [1, 4]
    assert reread(tmp_path) == [bytes([number]) * MIB for number in range(4)]
    journal.rotate(refer([]))
    assert names(tmp_path) == [5], "nobody holds anything in the first one any more"
    journal.close()


def test_old_segments_stay_until_the_new_one_has_been_read_back(tmp_path: Path, monkeypatch) -> None:
    """A disk that accepts everything and stores something else."""
    journal = Journal(tmp_path, sync=False, keep=False)
    held = [journal.append(HandBack(0, LEFT), b"x" * 1000)]
    real = os.fsync

    def fsync(file: int) -> None:
        real(file)
        path = f"/proc/self/fd/{file}"
        if os.readlink(path).endswith("next.tmp"):
            with open(path, "r+b") as again:
                again.seek(-3, os.SEEK_END)
                again.write(b"???")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="reads back with other bytes"):
            journal.rotate(refer(held), held)
    journal.append(Requeue(1))
    journal.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["000001.wal"]
    assert [record.event for record in since_snapshot(tmp_path)] == [HandBack(0, LEFT), Requeue(1)]
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
                journal.rotate(lambda mine=mine: note({g: s.extent for g, s in mine.items()}), list(mine.values()))
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
    for event, payload in since_snapshot(folder, repair=True):
        match event:
            case Snapshot():
                extents = event.scheduler.items()
                found = {group: Stored(reader(folder), extent=Extent(*extent)) for group, extent in extents}
            case HandBack():
                found[event.id] = payload  # type: ignore[assignment]
            case Drop():
                del found[event.id]
    return found


# ---- memory ---------------------------------------------------------------------------------------------------------

TOKENS = 200_000


def big(group_id: int) -> tuple[Head, bytes]:
    """A group of 1.8 MB."""
    head = make_head(group_id, [(1, TOKENS, 0, 1, 0.0)], [(0, TOKENS)], {0: "digest"})
    return head, np.random.default_rng(group_id).bytes(head.size)


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes allocated during the call."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
