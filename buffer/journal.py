"""The write-ahead log: what happened to groups, in order, on disk before anybody is told that it happened.

A folder of segment files (`buffer.segment_file`). Records are collected by `append` and reach the file together (one
write and one fsync for all that arrived at once) by `commit`, or by `advance`, which does not wait for the disk.
`rotate` begins a segment with a snapshot of the state, after which the segments before it are not needed to resume;
with `keep` they stay, for replays.

A crash can tear what was written last: `scan` finds that by length and checksum, cuts it off, and goes on. Damage with
whole records behind it is an error. A full disk leaves the file as it was before the commit, and the records wait.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from buffer.segment_file import MAGIC, JournalError, Record, SegmentFile, pack, read, sync_folder, written_later

log = logging.getLogger(__name__)
SNAPSHOT = "snapshot"
KINDS = (SNAPSHOT, "admit", "push", "partial", "start", "advance", "requeue", "drop", "filter", "serve", "finish")
"""Of records; `buffer.recovery` says what each does."""
__all__ = ["MAGIC", "SNAPSHOT", "Journal", "JournalError", "Record", "scan", "segments", "since_snapshot"]


def segments(folder: Path) -> list[Path]:
    """The segment files, oldest first."""
    return sorted(folder.glob("*.wal"))


class Journal:
    """Appends to the newest segment of `folder`. `sync`: fsync at each commit. `keep`: never delete a segment."""

    def __init__(self, folder: Path, *, sync: bool, keep: bool):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.sync, self.keep = folder, sync, keep
        self._pending: list[Any] = []
        self._in_flight: list[Any] = []
        self._writing: Future[None] | None = None
        self._writer = ThreadPoolExecutor(1, "journal")
        self._in_flight_until = self.appended = 0
        self.committed = 0
        self.commits = 0
        existing = segments(folder)
        self._number = int(existing[-1].stem) if existing else 0
        if existing:
            self._file = SegmentFile(existing[-1], sync=sync)
        else:
            self._number += 1
            self._file = SegmentFile(self._path, sync=sync, new=True)
            self._name_is_durable()

    @property
    def _path(self) -> Path:
        return self.folder / f"{self._number:06d}.wal"

    def _name_is_durable(self) -> None:
        if self.sync:
            sync_folder(self.folder)

    def append(self, kind: str, fields: list[Any], payload: Any = b"") -> None:
        """Add a record to the next commit. The payload is kept as it is until then."""
        self._pending += pack(kind, fields, payload)
        self.appended += 1

    @property
    def busy(self) -> bool:
        """Is a write under way that `advance` has begun?"""
        return self._writing is not None

    def commit(self) -> None:
        """Make all appended records durable. Raises OSError (disk full, ...): then nothing of them is in the file."""
        self._settle()
        if self._pending:
            self._file.append(self._pending)
            self._pending = []
            self.commits += 1
        self.committed = self.appended

    def advance(self) -> int:
        """How many of the `appended` records are durable; begins to write the others. Only a journal that syncs makes
        its caller wait for long, so only that is done in the background, one write at a time. Raises OSError as
        `commit` does; the records wait for the next call."""
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
        """The end of the write that is under way, waited for."""
        if self._writing is None:
            return
        error, self._writing = self._writing.exception(), None
        if error:
            self._pending = self._in_flight + self._pending
            raise error
        self._in_flight, self.committed = [], self._in_flight_until
        self.commits += 1

    def rotate(self, snapshot: list[Any], payloads: bytes) -> None:
        """Begin a segment that needs no earlier one. Raises OSError; the earlier segments are deleted only after."""
        self.commit()
        old = self._file
        earlier = segments(self.folder)
        beside, named = self.folder / "next.tmp", self.folder / f"{self._number + 1:06d}.wal"
        try:
            with beside.open("wb") as file:
                file.writelines([MAGIC, *pack(SNAPSHOT, snapshot, payloads)])
                file.flush()
                os.fsync(file.fileno())
            new = SegmentFile(beside, sync=self.sync)
        except OSError:
            beside.unlink(missing_ok=True)  # on a full disk it would take what the earlier segment can still have
            raise
        try:
            beside.rename(named)
            self._name_is_durable()
        except OSError:
            named.unlink(missing_ok=True)  # its snapshot would hide what the earlier segment is told from now on
            new.close()
            raise
        self._file, self._number = new, self._number + 1
        old.close()
        if not self.keep:
            for path in earlier:
                path.unlink()

    def close(self) -> None:
        self._writer.shutdown()
        self._file.close()


def scan(folder: Path, *, repair: bool = False) -> Iterator[Record]:
    """All records, oldest first. `repair` cuts a torn tail off the newest segment. Raises JournalError."""
    paths = segments(folder)
    for path in paths:
        good = yield from read(path)
        size = path.stat().st_size
        if good == size > 0:
            continue
        if path != paths[-1]:
            raise JournalError(f"{path} is damaged at byte {good} of {size}, and later segments follow")
        if written_later(path, good, KINDS):
            raise JournalError(
                f"{path} is damaged at byte {good} of {size}, and whole records follow: no crash has torn it. To go on "
                f"without them, keep a copy and run: truncate -s {good} {path}"
            )
        log.warning("%s: the last %d bytes are torn (its writer died) and are cut off", path, size - good)
        if repair:
            os.truncate(path, good)
            if good == 0:
                path.write_bytes(MAGIC)


def since_snapshot(folder: Path, *, repair: bool = False) -> list[Record]:
    """The records that a resume needs: the newest snapshot, if there is one, and all after it."""
    records: list[Record] = []
    for record in scan(folder, repair=repair):
        if record.kind == SNAPSHOT:
            records.clear()
        records.append(record)
    return records
