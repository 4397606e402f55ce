"""The journal against well-kept embedded stores: `python -m scripts.bench.stores [--groups N] [--json FILE]`.

Each contender stores the same run: groups are admitted, pushed with their payload, served and trained, and it holds as
many as a busy buffer. Each turn is one commit. The journal rotates as in a run; LMDB and SQLite delete old records, so
that their files stay equally small. Afterwards each reads all held groups, and the bytes are compared.

    memory   what was committed survives a killed process (LMDB: no sync; SQLite: WAL, synchronous=off)
    fsync    and a power cut (LMDB: as it comes; SQLite: WAL, synchronous=full)

A learner on 1,000 GPUs takes about 3,000 trajectories a second (30 to 300 MB/s): 375 groups of 8. The rows of 96 KB and
of 800 KB are both ends of that; `load` is the rate of a contender over that rate, by wall-clock time. They take
turns, and the fastest of `--repeats` rounds counts. LMDB is left out if it is not installed (`pip install lmdb`).
Metrics: `NAME_MODE_SIZE_{load,cpu_us}`; `cpu_us` is processor time per group.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from .figures import bench_parser, tell

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    parser = bench_parser("stores", "the journal against LMDB and SQLite")
    parser.add_argument("--groups", type=int, default=3000, help="groups of the smaller size")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="folder to write to (default: a temporary one)")
    ARGUMENTS = parser.parse_args()

import numpy as np
import xxhash

from areal_like.wire.groups import Head
from buffer import events
from buffer.journal import Journal
from buffer.payloads import Stored
from buffer.staleness import BatchesState, SlotsState

from ..console import output

SIZES = {"96 KB": 96 << 10, "800 KB": 800 << 10}
GROUPS_PER_SECOND = 375.0
TURN, HELD, PER_BATCH = 8, 256, 16
ROTATE_BYTES = 256 << 20
MODES = ("memory", "fsync")


class Contender(Protocol):
    """Stores events; `commit` ends a turn; `held` reads back."""

    def add(self, event: events.Event, payload: bytes = b"") -> None: ...

    def commit(self) -> None: ...

    def held(self, group_id: int) -> bytes: ...

    def close(self) -> None: ...


class OwnJournal:
    """`buffer.journal`, rotated when a segment reaches the buffer's limit."""

    def __init__(self, folder: Path, sync: bool):
        self._journal = Journal(folder, sync=sync, keep=False)
        self._held: dict[int, Stored] = {}
        self._written = 0

    def add(self, event: events.Event, payload: bytes = b"") -> None:
        kept = self._journal.append(event, payload)
        self._written += len(payload)
        if isinstance(event, events.Push):
            assert isinstance(kept, Stored)
            self._held[event.head.id] = kept
        elif isinstance(event, events.Finish):
            for group_id in range(event.batch * PER_BATCH, (event.batch + 1) * PER_BATCH):
                del self._held[group_id]

    def commit(self) -> None:
        self._journal.commit()
        if self._written > ROTATE_BYTES:
            self._written = 0
            self._journal.rotate(self._snapshot, list(self._held.values()))

    def _snapshot(self) -> events.Snapshot:
        groups = [
            events.Held(id, id, 0, 8, 8, "waiting", "", 0, (), id, 0, -1, "actor-0", False, None, stored.extent, None)
            for id, stored in self._held.items()
        ]
        return events.Snapshot(**_NOTHING, groups=groups)

    def held(self, group_id: int) -> bytes:
        return bytes(self._held[group_id].load())

    def close(self) -> None:
        self._journal.close()


class Lmdb:
    """Two tables in one file: events by number while a resume needs them, payloads by group."""

    def __init__(self, folder: Path, sync: bool):
        lmdb = importlib.import_module("lmdb")
        self._env = lmdb.open(str(folder), map_size=8 << 30, max_dbs=2, sync=sync, metasync=sync)
        self._events, self._payloads = (self._env.open_db(name, integerkey=True) for name in (b"events", b"payloads"))
        self._transaction = self._env.begin(write=True, buffers=False)
        self._number, self._first = 0, 0

    def add(self, event: events.Event, payload: bytes = b"") -> None:
        self._number += 1
        self._transaction.put(_key(self._number), _packed(event, payload), db=self._events, append=True)
        if isinstance(event, events.Push):
            self._transaction.put(_key(event.head.id), payload, db=self._payloads, append=True)
        elif isinstance(event, events.Finish):
            for group_id in range(event.batch * PER_BATCH, (event.batch + 1) * PER_BATCH):
                self._transaction.delete(_key(group_id), db=self._payloads)

    def commit(self) -> None:
        if self._number - self._first > 4 * HELD:  # a snapshot would replace them
            for number in range(self._first, self._number - 2 * HELD):
                self._transaction.delete(_key(number), db=self._events)
            self._first = self._number - 2 * HELD
        self._transaction.commit()
        self._transaction = self._env.begin(write=True)

    def held(self, group_id: int) -> bytes:
        return bytes(self._transaction.get(_key(group_id), db=self._payloads))

    def close(self) -> None:
        self._transaction.abort()
        self._env.close()


class Sqlite:
    """The same two tables; write-ahead log, pages of 16 KB (the fastest of 4 to 64 here)."""

    def __init__(self, folder: Path, sync: bool):
        folder.mkdir(parents=True)
        self._db = sqlite3.connect(folder / "store.db", isolation_level=None)
        for pragma in ("page_size=16384", "journal_mode=wal", f"synchronous={'full' if sync else 'off'}"):
            self._db.execute(f"pragma {pragma}")
        self._db.execute("create table events (number integer primary key, bytes blob)")
        self._db.execute("create table payloads (id integer primary key, bytes blob)")
        self._db.execute("begin")
        self._number, self._first = 0, 0

    def add(self, event: events.Event, payload: bytes = b"") -> None:
        self._number += 1
        self._db.execute("insert into events values (?, ?)", (self._number, _packed(event, payload)))
        if isinstance(event, events.Push):
            self._db.execute("insert into payloads values (?, ?)", (event.head.id, payload))
        elif isinstance(event, events.Finish):
            first = event.batch * PER_BATCH
            self._db.execute("delete from payloads where id between ? and ?", (first, first + PER_BATCH - 1))

    def commit(self) -> None:
        if self._number - self._first > 4 * HELD:
            self._first = self._number - 2 * HELD
            self._db.execute("delete from events where number < ?", (self._first,))
        self._db.execute("commit")
        self._db.execute("begin")

    def held(self, group_id: int) -> bytes:
        return bytes(self._db.execute("select bytes from payloads where id = ?", (group_id,)).fetchone()[0])

    def close(self) -> None:
        self._db.close()


_NOTHING: dict[str, Any] = {
    "admitted": 0, "trained": 0, "requeued": 0, "resumed": 0, "pushes": 0, "staleness_max": 0, "scheduler": None,
    "decided": {}, "planned": {}, "filtered": {}, "dropped": {},
    "slots": SlotsState(0, []), "batches": BatchesState(1, 0, [0]),
}  # fmt: skip


def _key(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _packed(event: events.Event, payload: bytes) -> bytes:
    """Adds a checksum of the payload, as in the journal: neither store checks for damaged bytes."""
    return events.encode(event) + xxhash.xxh3_64_digest(payload)


def contenders() -> dict[str, Callable[[Path, bool], Contender]]:
    found: dict[str, Callable[[Path, bool], Contender]] = {"journal": OwnJournal, "sqlite": Sqlite}
    if importlib.util.find_spec("lmdb"):
        found["lmdb"] = Lmdb
    return found


def history(groups: int, size: int) -> Iterator[list[tuple[events.Event, bytes]]]:
    """The events of each turn, with payloads that carry their group's number."""
    template = bytearray(np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes())
    rows, runs = bytes(8 * 32), bytes(8 * 16)
    turn: list[tuple[events.Event, bytes]] = []
    batch = 0
    for group_id in range(groups):
        template[:8] = _key(group_id)
        head = Head(group_id, 8, 1.0, {0: "d" * 32}, rows, runs, size, 0, 0, 8 * 1000)
        turn.append((events.Admit(group_id, group_id, 8, 8, "actor-0", 0), b""))
        turn.append((events.Push(head, 0, "actor-0"), bytes(template)))
        if group_id >= HELD and group_id % PER_BATCH == 0:
            ids = list(range(batch * PER_BATCH, (batch + 1) * PER_BATCH))
            turn += [(events.Serve(batch, ids, 0), b""), (events.Finish(batch), b"")]
            batch += 1
        if group_id % TURN == TURN - 1:
            yield turn
            turn = []


def play(store: Contender, turns: list[list[tuple[events.Event, bytes]]]) -> tuple[float, float]:
    """Seconds of wall-clock and processor time."""
    clock, processor = time.perf_counter(), time.process_time()
    for turn in turns:
        for event, payload in turn:
            store.add(event, payload)
        store.commit()
    return time.perf_counter() - clock, time.process_time() - processor


def measure(
    make: Callable[[Path, bool], Contender], mode: str, turns: Any, size: int, folder: Path
) -> dict[str, float]:
    """Play it in an empty folder, check that all held groups can be read, and remove it."""
    place = Path(tempfile.mkdtemp(dir=folder))
    store = make(place / "store", mode == "fsync")
    try:
        seconds, processor = play(store, turns)
        groups = TURN * len(turns)
        for group_id in range(groups - HELD // 2, groups):
            found = store.held(group_id)
            if len(found) != size or found[:8] != _key(group_id):
                raise AssertionError(f"group {group_id} is not what was written")
    finally:
        store.close()
        shutil.rmtree(place)
    return {"load": groups / seconds / GROUPS_PER_SECOND, "cpu_us": 1e6 * processor / groups}


def show(metrics: dict[str, float], names: list[str]) -> None:
    table = output.table("times the load of 1,000 GPUs (µs of processor time per group)", "", *names)
    for mode in MODES:
        for size in SIZES:
            cells = [_of(metrics, name, mode, size) for name in names]
            table.add_row(f"{mode}, {size}", *(f"{load:.1f} ({cpu:.0f})" for load, cpu in cells))
    output.console().print(table)


def _of(metrics: dict[str, float], name: str, mode: str, size: str) -> tuple[float, float]:
    key = f"{name}_{mode}_{size.replace(' ', '').lower()}"
    return metrics[f"{key}_load"], metrics[f"{key}_cpu_us"]


def main(args: argparse.Namespace) -> None:
    known, metrics = contenders(), dict[str, float]()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="stores-") as folder:
        for label, size in SIZES.items():
            turns = list(history(max(2 * HELD, args.groups * min(SIZES.values()) // size), size))
            for mode in MODES:
                for _ in range(args.repeats):
                    for name, make in known.items():
                        found = measure(make, mode, turns, size, Path(folder))
                        key = f"{name}_{mode}_{label.replace(' ', '').lower()}"
                        metrics[f"{key}_load"] = max(metrics.get(f"{key}_load", 0.0), found["load"])
                        metrics[f"{key}_cpu_us"] = min(metrics.get(f"{key}_cpu_us", float("inf")), found["cpu_us"])
    show(metrics, list(known))
    tell(metrics, args.json)


if __name__ == "__main__":
    main(ARGUMENTS)
