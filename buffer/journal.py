"""The write-ahead log: what happened to groups, in order. A record is on disk before a message that depends on it.

The journal is a folder of segment files (`buffer.segment_file`). `append` collects records. `commit` writes them
together, with one write and one fsync; `advance` does the same without waiting for the disk.

`rotate` begins a segment with a snapshot of the state, when a checkpoint of the learner is durable. A resume from there
reads no earlier segment; one more if the learner has trained beyond the checkpoint by then (`late`). Payloads stay
where they were written; the snapshot has their places. A rotation deletes segments that no kept checkpoint needs, after
it has read back the new one. `keep`: delete nothing, for replays.

A crash can tear the last write: a resume cuts it off and continues. Damage before an intact later record is an error,
and so is a segment without its snapshot. A full disk leaves the file as it was before the commit, and the records wait.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from areal_like.run.run_folder import sync as sync_folder
from areal_like.wire.stored import Payload, Read, Stored
from buffer.events import Begin, Event, Finish, Snapshot, decode, encode
from buffer.segment_file import (
    MAGIC,
    Item,
    JournalError,
    SegmentFile,
    check_first,
    check_size,
    number_of,
    path_of,
    read,
    read_payload,
    written_later,
)

log = logging.getLogger(__name__)
__all__ = ["MAGIC", "Journal", "JournalError", "Record"]


class Record(NamedTuple):
    event: Event
    payload: Payload = b""


def segments(folder: Path) -> list[Path]:
    """The segment files, oldest first."""
    return sorted(folder.glob("*.wal"), key=number_of)


def reader(folder: Path) -> Read:
    """A function that reads payloads of the journal in `folder`; it raises JournalError."""
    return partial(read_payload, folder)


class Journal:
    """Appends to the newest segment of `folder`. `sync`: fsync at each commit. `keep`: never delete a segment; else the
    last `checkpoints` rotations stay. The first `committed` of the `appended` records are durable."""

    def __init__(self, folder: Path, *, sync: bool, keep: bool, checkpoints: int = 1):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.sync, self.keep = folder, sync, keep
        self._pending: list[Item] = []
        self._in_flight: list[Item] = []
        self._writing: Future[None] | None = None
        self._writer = ThreadPoolExecutor(1, "journal")
        self._in_flight_until = self.appended = self.committed = 0
        existing = segments(folder)
        self._number = number_of(existing[-1]) if existing else 1
        self._needed = deque([(False, {self._number, *map(number_of, existing)})], maxlen=checkpoints + 1)
        self._file = SegmentFile(path_of(folder, self._number), self._number, sync=sync, new=not existing)
        self._read = reader(folder)
        if self.sync:
            sync_folder(folder)  # the name of its file is durable

    def append(self, event: Event, payload: Payload = b"") -> Payload:
        """Add a record to the next commit. Returns the payload in the form to keep; its bytes must not change until the
        commit. Raises JournalError if the record is too large."""
        if len(payload) and not isinstance(payload, Stored):
            payload = Stored(self._read, data=payload)
        self._pending.append(check_size((encode(event), payload)))
        self.appended += 1
        return payload

    @property
    def busy(self) -> bool:
        """Is a write of `advance` under way?"""
        return self._writing is not None

    def commit(self) -> None:
        """Make all appended records durable. Raises OSError (disk full, ...): then none of them is in the file."""
        self._settle()
        if self._pending:
            self._file.append(self._pending)
            self._pending = []
        self.committed = self.appended

    def advance(self) -> int:
        """Returns how many records are durable, and begins to write others. Only a journal with `sync` is slow: it
        writes in the background, one write at a time. Raises OSError as `commit` does; the records then wait."""
        if not self.sync:
            self.commit()
        elif self._writing is None or self._writing.done():
            self._settle()
            if self._pending:
                self._in_flight, self._pending = self._pending, []
                self._in_flight_until = self.appended
                self._writing = self._writer.submit(self._file.append, self._in_flight)
        return self.committed

    def _settle(self) -> None:
        """Wait for the end of the write that is under way."""
        if self._writing is None:
            return
        error, self._writing = self._writing.exception(), None
        if error:
            self._pending = self._in_flight + self._pending
            raise error
        self._in_flight, self.committed = [], self._in_flight_until

    def rotate(self, snapshot: Callable[[], Snapshot], held: Sequence[Stored] = (), late: bool = False) -> None:
        """Begin a segment with a snapshot. `snapshot` is called once all of `held`, the payloads of the state, have
        their places in files. `late`: the state has training that the checkpoint lacks. The time
        grows with the number of groups, not with their payloads. Raises OSError, JournalError (snapshot too large);
        then the segments are unchanged."""
        self.commit()
        number = self._number + 1
        beside, named = self.folder / "next.tmp", path_of(self.folder, number)
        first = check_size((encode(snapshot()), b""))
        try:
            beside.unlink(missing_ok=True)
            new = SegmentFile(beside, number, sync=True, new=True)
            new.append([first])
            new.sync = self.sync
            check_first(beside, number, first[0])
        except OSError:
            beside.unlink(missing_ok=True)  # on a full disk it would take the earlier segment's room
            raise
        try:
            beside.rename(named)
            if self.sync:
                sync_folder(self.folder)
        except OSError:
            named.unlink(missing_ok=True)  # its snapshot would hide later records of the earlier segment
            new.close()
            raise
        self._file.close()
        self._file, self._number = new, number
        self._needed.append((late, {number, *(each.extent.segment for each in held if each.extent)}))
        full = len(self._needed) == self._needed.maxlen
        spare = 1 if full and not self._needed[1][0] else 0  # a resume from the oldest kept checkpoint needs it if late
        needed = set[int]().union(*(segments for _, segments in list(self._needed)[spare:]))
        for path in [] if self.keep else segments(self.folder):
            if number_of(path) not in needed:
                try:
                    path.unlink()
                except OSError as error:  # the next rotation tries again
                    log.warning("can't delete a segment that is no longer needed: %s", error)

    def close(self) -> None:
        self._writer.shutdown()
        self._file.close()


@dataclass(frozen=True)
class Recorded:
    """The records of a journal, oldest first; each iteration reads the files again. Their payloads are `Stored`: `load`
    reads them. Those of the newest segment alone, which begin with its snapshot (unless it is the first segment), are
    enough for a resume unless it began `late`. `next_batch`: those for a resume that begins with this batch, if they
    are there. `whole`: those of all segments. `repair`: cut a torn tail off the newest segment. `check`: also check the
    bytes of payloads. Iterating raises JournalError."""

    folder: Path
    whole: bool = False
    repair: bool = False
    check: bool = False
    next_batch: int | None = None

    def __iter__(self) -> Iterator[Record]:
        paths = segments(self.folder)
        first = 0 if self.whole else len(paths) - 1
        if self.next_batch is not None and not self.whole:
            first = _first_before(self.next_batch, paths)
        for path in paths[max(0, first) :]:
            yield from _records(path, path == paths[-1], self.repair, self.check)


def _first_before(batch: int, paths: Sequence[Path]) -> int:
    """The place of the first segment for a resume at this batch: none before it has training that this start undoes, or
    one that is recorded from there on."""
    first, begun = len(paths) - 1, [batch]
    for place in range(first, -1, -1):
        if place < len(paths) - 1 and number_of(paths[place + 1]) > number_of(paths[place]) + 1:
            break  # it is there for payloads alone
        records = _records(paths[place], place == len(paths) - 1, repair=False, check=False)
        found = [each.event for each in records if isinstance(each.event, Begin | Finish)]
        trained = [event.batch for event in found if isinstance(event, Finish)]
        if trained and place < first:
            if max(trained) < min(begun):
                break
            first = place
        begun += [event.batch for event in found if isinstance(event, Begin)]
    return first


def scan(folder: Path) -> Iterator[Record]:
    """All records, with their payloads checked."""
    return iter(Recorded(folder, whole=True, check=True))


def check_payloads(folder: Path, held: Iterable[Stored]) -> None:
    """Check that the segments of these payloads exist and are long enough. Raises JournalError."""
    ends: dict[int, int] = {}
    for each in held:
        if each.extent:
            number = each.extent.segment
            ends[number] = max(ends.get(number, 0), each.extent.offset + each.size)
    for number, end in ends.items():
        path = path_of(folder, number)
        size = path.stat().st_size if path.exists() else 0
        if size < end:
            raise JournalError(f"{path} has {size} bytes, but payloads of active groups reach up to byte {end}")


def _records(path: Path, newest: bool, repair: bool, check: bool) -> Iterator[Record]:
    read_back, records = reader(path.parent), read(path, check=check)
    while True:
        try:
            fields, extent = next(records)
        except StopIteration as end:
            good, size = end.value
            break
        try:
            event = decode(fields)
        except msgspec.DecodeError as error:
            raise JournalError(f"{path} has a record of another version of this program ({error})") from None
        yield Record(event, Stored(read_back, extent=extent) if extent.size else b"")
    if good == size > 0:
        return
    faults = {
        "later segments follow": not newest,
        "its snapshot was on disk before the segment began": number_of(path) > 1 and good <= len(MAGIC),
        "intact later records follow": newest and written_later(path, good, size),
    }
    for proof, found in faults.items():
        if found:
            raise JournalError(
                f"{path} is damaged at byte {good} of {size}, and {proof}, so a crash is not the cause. Put the file "
                "back, or start a new run from a checkpoint"
            )
    log.warning("%s: its writer died; cutting off the last %d bytes, which are torn", path, size - good)
    if repair:
        os.truncate(path, good)
        if good == 0:
            path.write_bytes(MAGIC)
