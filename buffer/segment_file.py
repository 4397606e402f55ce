"""The bytes of one file of the journal: the format of a record, how to append records, and how to read them.

A file is `MAGIC` and then records, little-endian:

    [mark 4][bytes of the fields u32][bytes of the payload u64][xxh3-64 of the payload][durable u64]
    [xxh3-64 of the head so far and the fields, seeded with the file's number and the place][fields: msgpack][payload]

The mark and the checksum fit only this place of this file. So the bytes of a record alone show that it begins here,
whatever comes before it. `durable`: everything before that byte was on disk before this record was written. One append
writes all of its records or, after an error, none.

A file that must survive a power cut is written past the page cache (O_DIRECT; several times as fast here as the page
cache with a flush). O_DIRECT writes whole blocks, so each append ends with a record of padding. No block is written
twice, so a torn write can't damage earlier records. Without O_DIRECT in the file system, or without `sync`, the page
cache is used.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import xxhash

from buffer.events import CopiedPayload, Event, Padding, Written, decode, encode
from buffer.payloads import Bytes, Extent, JournalError, Payload, Read, Stored, load

FORMAT = 9
"""Version of the format: of the records (`buffer.events`) and of their layout in a file."""
_NAME = b"areal-journal-"
MAGIC = _NAME + b"%d\n" % FORMAT
READABLE = [MAGIC, _NAME + b"8\n", _NAME + b"7\n", _NAME + b"6\n"]
"""First lines of readable files: format 8 lacks `TakeOver`, format 7 also results for samplers, format 6 also tasks of
mixtures."""
MAX_FIELDS_BYTES, MAX_PAYLOAD_BYTES = 1 << 30, 1 << 32
_MARK = b"\xd7JR\x04"
_HEAD = struct.Struct("<4sIQQQ")
_CHECK = struct.Struct("<Q")
_HEAD_BYTES = _HEAD.size + _CHECK.size
_FORGET_BYTES = 4 << 20
_MAX_PIECES = 1024  # the most that Linux takes in one call
_BLOCK = 4096
_ROOM_BYTES = 4 << 20
_READ_BYTES = 1 << 20


class Record(NamedTuple):
    """An event, and its payload."""

    event: Event
    payload: Payload = b""


Item = tuple[bytes, Payload]
"""What to append: the event's bytes, and the payload."""


def pack(event: Written, payload: Payload = b"") -> Item:
    """The item of an event. Raises JournalError if it is too large for a reader."""
    packed = encode(event)
    for what, size, most in (
        ("fields", len(packed), MAX_FIELDS_BYTES),
        ("a payload", len(payload), MAX_PAYLOAD_BYTES),
    ):
        if size > most:
            tag = event.__struct_config__.tag
            raise JournalError(f"record {tag!r} has {what} of {size} bytes: the journal takes {most} at most")
    return packed, payload


def _seed(number: int, at: int) -> int:
    return ((number << 44) + at) & (1 << 64) - 1


def _pieces(number: int, at: int, durable: int, item: Item) -> tuple[list[Bytes], Extent]:
    """The bytes of a record at byte `at` of file `number`, and the place of its payload. Copies nothing."""
    packed, payload = item[0], load(item[1])
    checksum = xxhash.xxh3_64_intdigest(payload)
    head = _HEAD.pack(_MARK, len(packed), len(payload), checksum, durable) + packed
    check = _CHECK.pack(xxhash.xxh3_64_intdigest(head, seed=_seed(number, at)))
    extent = Extent(number, at + _HEAD_BYTES + len(packed), len(payload), checksum)
    return [head[: _HEAD.size] + check + packed, payload], extent


def _padding(end: int) -> Item:
    """A record of padding that fills the last block of a file of `end` bytes."""
    packed = encode(Padding())
    return packed, bytes((-end - _HEAD_BYTES - len(packed)) % _BLOCK)


class SegmentFile:
    """Appends to `path`, the file of that `number`; creates it if `new`. `sync`: appended records survive a power cut.
    Raises OSError."""

    def __init__(self, path: Path, number: int, *, sync: bool, new: bool = False):
        self._file = path.open("xb" if new else "r+b", buffering=0)
        self._number, self._sync = number, sync
        self._end = self._file.seek(0, os.SEEK_END)
        self._forgotten = 0
        self._direct = -1
        if new:
            self._write([memoryview(MAGIC)])
        if sync and (direct := _open_direct(path)) >= 0:
            if self._end % _BLOCK:
                self.append([_padding(self._end)])
            self._direct, self._room = direct, mmap.mmap(-1, _ROOM_BYTES)

    def append(self, items: Sequence[Item]) -> None:
        """Append all items, then set the `extent` of their payloads. Raises OSError (disk full, ...): then the file is
        unchanged."""
        pieces: list[Bytes] = []
        extents: list[tuple[Payload, Extent]] = []
        end = self._end
        for item in items:
            end = self._add(item, end, pieces, extents)
        if self._direct >= 0 and end % _BLOCK:
            self._add(_padding(end), end, pieces, extents)
        self._write([memoryview(piece).cast("B") for piece in pieces if len(piece)])
        for payload, extent in extents:
            if isinstance(payload, Stored):
                payload.extent = extent

    def _add(self, item: Item, at: int, pieces: list[Bytes], extents: list[tuple[Payload, Extent]]) -> int:
        """Add a record to `pieces` and `extents`; returns its end. Without `sync`, `durable` is its own place: the page
        cache keeps all earlier writes of a process that dies."""
        made, extent = _pieces(self._number, at, self._end if self._sync else at, item)
        pieces += made
        extents.append((item[1], extent))
        return extent.offset + extent.size

    def _write(self, views: list[memoryview]) -> None:
        """Write all views, or nothing and raise OSError."""
        size = sum(map(len, views))
        try:
            if self._direct >= 0:
                self._past_the_cache(views)
            else:
                for start in range(0, len(views), _MAX_PIECES):
                    self._through_the_cache(views[start : start + _MAX_PIECES])
            if self._sync:
                os.fdatasync(self._file.fileno())
        except OSError:
            self._file.seek(self._end)
            self._file.truncate()
            raise
        self._end += size
        self._forget_pages()

    def _through_the_cache(self, views: list[memoryview]) -> None:
        """Write until the kernel has taken all; it may take a part at a time."""
        while views:
            written = os.writev(self._file.fileno(), views)
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if views:
                views[0] = views[0][written:]

    def _past_the_cache(self, views: list[memoryview]) -> None:
        """Copy the views to aligned memory, as O_DIRECT needs, and write it. Their size is a whole number of blocks."""
        filled, at = 0, self._end
        for view in views:
            while view:
                part = view[: _ROOM_BYTES - filled]
                self._room[filled : filled + len(part)] = part
                filled, view = filled + len(part), view[len(part) :]
                if filled == _ROOM_BYTES:
                    at, filled = self._write_room(filled, at), 0
        self._write_room(filled, at)

    def _write_room(self, filled: int, at: int) -> int:
        """Write the first `filled` bytes of the aligned memory at byte `at`; returns where they end in the file."""
        with memoryview(self._room) as room:
            start = 0
            while start < filled:
                start += os.pwrite(self._direct, room[start:filled], at + start)
        return at + filled

    def _forget_pages(self) -> None:
        """Release pages of the page cache: a live run does not read them. (The kernel keeps pages until they are on
        disk.)"""
        if self._direct < 0 and self._end - self._forgotten >= _FORGET_BYTES:
            os.posix_fadvise(self._file.fileno(), 0, self._end, os.POSIX_FADV_DONTNEED)
            self._forgotten = self._end

    def close(self) -> None:
        self._file.close()
        if self._direct >= 0:
            os.close(self._direct)


def _open_direct(path: Path) -> int:
    """A file descriptor with O_DIRECT; -1 if the system can't do that."""
    flag = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | flag) if flag else -1
    except OSError:
        return -1


class _Found(NamedTuple):
    """A record whose head and event are intact: the event's bytes, its payload's place, `durable` (see the top)."""

    packed: bytes
    extent: Extent
    durable: int

    @property
    def end(self) -> int:
        return self.extent.offset + self.extent.size


def _record_at(file: BinaryIO, number: int, at: int) -> _Found | None:
    """The record at byte `at` of file `number`, its payload unread; None if there is none."""
    file.seek(at)
    head = file.read(_HEAD_BYTES)
    if len(head) < _HEAD_BYTES or not head.startswith(_MARK):
        return None
    _, length, size, checksum, durable = _HEAD.unpack_from(head)
    packed = file.read(length) if length <= MAX_FIELDS_BYTES else b""
    (check,) = _CHECK.unpack_from(head, _HEAD.size)
    if xxhash.xxh3_64_intdigest(head[: _HEAD.size] + packed, seed=_seed(number, at)) != check:
        return None
    return _Found(packed, Extent(number, at + _HEAD_BYTES + length, size, checksum), durable)


def _is_whole(file: BinaryIO, extent: Extent) -> bool:
    """Is a payload intact?"""
    file.seek(extent.offset)
    left, checksum = extent.size, xxhash.xxh3_64()
    while left and (piece := file.read(min(left, _READ_BYTES))):
        checksum.update(piece)
        left -= len(piece)
    return not left and checksum.intdigest() == extent.checksum


def read(path: Path, read_payload: Read, *, check: bool = True) -> Generator[Record, None, tuple[int, int]]:
    """Yields the records of segment file `path`; their payloads are `Stored`, which `read_payload` reads. Returns where
    the last intact record ends, and the size of the file at the start. Without `check`, damage of a payload shows only
    when it is loaded. Raises JournalError for another format."""
    with path.open("rb") as file:
        size, magic = os.fstat(file.fileno()).st_size, file.read(len(MAGIC))
        if magic not in READABLE:
            if len(magic) == len(MAGIC) and magic.startswith(_NAME):
                raise JournalError(
                    f"{path} was written by another version of this program (its format is "
                    f"{magic[len(_NAME) : -1].decode(errors='replace')}, ours {FORMAT}): use that version for this run"
                )
            return 0, size
        good, number = len(MAGIC), number_of(path)
        while (found := _record_at(file, number, good)) and found.end <= size:
            if check and not _is_whole(file, found.extent):
                break
            good = found.end
            event = _event(path, found)
            if not isinstance(event, Padding | CopiedPayload):
                yield Record(event, Stored(read_payload, extent=found.extent) if found.extent.size else b"")
        return good, size


def _event(path: Path, found: _Found) -> Written:
    """Decode an intact record. Raises JournalError if it is none of our events."""
    try:
        return decode(found.packed)
    except msgspec.DecodeError as error:
        raise JournalError(
            f"{path} has a record of another version of this program ({error}): use that version for this run"
        ) from None


def written_later(path: Path, start: int, size: int) -> bool:
    """Was a record in the first `size` bytes of a file written after the bytes at `start` were complete? Then no crash
    has torn these bytes.

    Through the page cache, bytes reach the file in order, so any record after `start` proves it. Past the cache, the
    blocks of one append may reach the disk in any order, so only a record of a later append proves it.
    """
    number = number_of(path)
    with path.open("rb") as file:
        at = start
        while (at := _find(file, _MARK, at + 1, size)) >= 0:
            found = _record_at(file, number, at)
            if found and start < found.durable and found.extent.offset <= size:
                return True
    return False


def _find(file: BinaryIO, what: bytes, start: int, end: int) -> int:
    """The first place of `what` that lies wholly between `start` and `end`; -1 if there is none."""
    while start + len(what) <= end:
        file.seek(start)
        part = file.read(min(_READ_BYTES, end - start))
        if (place := part.find(what)) >= 0:
            return start + place
        if len(part) < len(what):
            break
        start += len(part) - len(what) + 1
    return -1


def number_of(path: Path) -> int:
    """The number of a segment file; each folder counts from 1."""
    return int(path.stem)


def path_of(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.wal"


def read_payload(folder: Path, extent: Extent) -> bytes:
    """The bytes of a payload. Raises JournalError if they can't be read or are damaged."""
    path = path_of(folder, extent.segment)
    try:
        with path.open("rb") as file:
            file.seek(extent.offset)
            data = file.read(extent.size)
    except OSError as error:
        raise JournalError(f"can't read a payload of the journal ({error})") from error
    if len(data) < extent.size or xxhash.xxh3_64_intdigest(data) != extent.checksum:
        raise JournalError(f"{path} is damaged: the payload of {extent.size} bytes at byte {extent.offset}")
    return data


def write_first(path: Path, number: int, item: Item) -> None:
    """Create the file of that number with one record, and check that the disk has all of it. Raises OSError."""
    pieces, extent = _pieces(number, len(MAGIC), len(MAGIC), item)
    with path.open("wb") as file:
        file.writelines([MAGIC, *pieces])
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the read below comes from the disk
    with path.open("rb") as file:
        found = _record_at(file, number, len(MAGIC))
        if not found or found.extent != extent or not _is_whole(file, extent):
            raise OSError(errno.EIO, "the file reads back with other bytes than were written", str(path))
