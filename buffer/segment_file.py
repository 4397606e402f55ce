"""The bytes of one file of the journal: how a record stands in it, how records are appended, and how they are read.

A file is `MAGIC` and then records, little-endian:

    [mark 4][bytes of the fields u32][bytes of the payload u64][xxh3-64 of the payload][durable u64]
    [xxh3-64 of the head so far and the fields, seeded with the file's number and the place][fields: msgpack][payload]

So whether a record begins at some byte follows from these bytes alone, whatever its kind and whatever stands before it:
a mark and a checksum that only fit this place of this file. `durable`: all before that byte had been written when this
record was. What is appended at once is there as a whole or, after an error, not at all.

A file that is to survive a power cut is written past the page cache (O_DIRECT, several times as fast here as writing
through it and having it flushed). That goes by whole blocks, so each append ends with a record of padding; no block is
written twice, and a torn write can't reach what was durable before. Where the file system can't do that, or nobody
asked for it, the page cache is used.
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

from buffer.events import Copy, Event, Padding, Written, decode, encode
from buffer.payloads import Bytes, Extent, JournalError, Payload, Read, Stored, load

FORMAT = 6
"""Of the records (`buffer.events`) and of how they stand in a file."""
_NAME = b"areal-journal-"
MAGIC = _NAME + b"%d\n" % FORMAT
MAX_FIELDS_BYTES, MAX_PAYLOAD_BYTES = 1 << 30, 1 << 32
_MARK = b"\xd7JR\x04"
_HEAD = struct.Struct("<4sIQQQ")
_CHECK = struct.Struct("<Q")
_HEAD_BYTES = _HEAD.size + _CHECK.size
_FORGET_BYTES = 4 << 20
_MAX_PIECES = 1024  # that Linux takes in one call
_BLOCK = 4096
_ROOM_BYTES = 4 << 20
_READ_BYTES = 1 << 20


class Record(NamedTuple):
    """What has happened, and the payload that belongs to it."""

    event: Event
    payload: Payload = b""


Item = tuple[bytes, Payload]
"""What is to be appended: the event's bytes, and the payload."""


def pack(event: Written, payload: Payload = b"") -> Item:
    """Raises JournalError for what no reader would take."""
    packed = encode(event)
    for what, size, most in (
        ("fields", len(packed), MAX_FIELDS_BYTES),
        ("a payload", len(payload), MAX_PAYLOAD_BYTES),
    ):
        if size > most:
            tag = event.__struct_config__.tag
            raise JournalError(f"a record {tag!r} with {what} of {size} bytes: the journal takes {most} at most")
    return packed, payload


def _seed(number: int, at: int) -> int:
    return ((number << 44) + at) & (1 << 64) - 1


def _pieces(number: int, at: int, durable: int, item: Item) -> tuple[list[Bytes], Extent]:
    """A record as it stands at byte `at` of file `number`, and where its payload does; nothing is copied."""
    packed, payload = item[0], load(item[1])
    checksum = xxhash.xxh3_64_intdigest(payload)
    head = _HEAD.pack(_MARK, len(packed), len(payload), checksum, durable) + packed
    check = _CHECK.pack(xxhash.xxh3_64_intdigest(head, seed=_seed(number, at)))
    extent = Extent(number, at + _HEAD_BYTES + len(packed), len(payload), checksum)
    return [head[: _HEAD.size] + check + packed, payload], extent


def _padding(end: int) -> Item:
    """A record that ends on a block, for a file of `end` bytes."""
    packed = encode(Padding())
    return packed, bytes((-end - _HEAD_BYTES - len(packed)) % _BLOCK)


class SegmentFile:
    """Appends to `path`, the file of that `number`, made if `new`. `sync`: what is appended survives a power cut.
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
        """All of them; then their payloads know where they lie. Raises OSError (disk full, ...): then the file is as it
        was."""
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
        """Returns where it ends. Through the page cache whoever dies leaves all that it wrote before."""
        made, extent = _pieces(self._number, at, self._end if self._sync else at, item)
        pieces += made
        extents.append((item[1], extent))
        return extent.offset + extent.size

    def _write(self, views: list[memoryview]) -> None:
        """All, or nothing and an OSError."""
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
        """The kernel may take a part at a time."""
        while views:
            written = os.writev(self._file.fileno(), views)
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if views:
                views[0] = views[0][written:]

    def _past_the_cache(self, views: list[memoryview]) -> None:
        """By way of memory that is aligned as the disk wants it; all of it is a whole number of blocks."""
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
        """Returns where it ends in the file."""
        with memoryview(self._room) as room:
            start = 0
            while start < filled:
                start += os.pwrite(self._direct, room[start:filled], at + start)
        return at + filled

    def _forget_pages(self) -> None:
        """Nobody reads what was written while the run lives: the page cache is for others (the kernel goes on writing
        what is not yet on disk, and keeps it until then)."""
        if self._direct < 0 and self._end - self._forgotten >= _FORGET_BYTES:
            os.posix_fadvise(self._file.fileno(), 0, self._end, os.POSIX_FADV_DONTNEED)
            self._forgotten = self._end

    def close(self) -> None:
        self._file.close()
        if self._direct >= 0:
            os.close(self._direct)


def _open_direct(path: Path) -> int:
    """-1 where that is not to be had."""
    flag = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | flag) if flag else -1
    except OSError:
        return -1


def sync_folder(folder: Path) -> None:
    """Make the names of the files in it durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Found(NamedTuple):
    """A record whose head and event are whole: the event's bytes, where its payload lies, `durable` (see the top)."""

    packed: bytes
    extent: Extent
    durable: int

    @property
    def end(self) -> int:
        return self.extent.offset + self.extent.size


def _record_at(file: BinaryIO, number: int, at: int) -> _Found | None:
    """What begins at byte `at` of file `number`, its payload unread; None if that is no record."""
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
    """Are the bytes of a payload those that were written?"""
    file.seek(extent.offset)
    left, checksum = extent.size, xxhash.xxh3_64()
    while left and (piece := file.read(min(left, _READ_BYTES))):
        checksum.update(piece)
        left -= len(piece)
    return not left and checksum.intdigest() == extent.checksum


def read(path: Path, read_payload: Read, *, check: bool = True) -> Generator[Record, None, tuple[int, int]]:
    """Yields the records of segment file `path`, their payloads as `Stored`, which `read_payload` will read. Returns
    where the last good one ends, and how long the file was at the beginning. Without `check` a damaged payload is not
    noticed until it is loaded. Raises JournalError for another format."""
    with path.open("rb") as file:
        size, magic = os.fstat(file.fileno()).st_size, file.read(len(MAGIC))
        if magic != MAGIC:
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
            if not isinstance(event, Padding | Copy):
                yield Record(event, Stored(read_payload, extent=found.extent) if found.extent.size else b"")
        return good, size


def _event(path: Path, found: _Found) -> Written:
    """Its bytes are those that were written. Raises JournalError if they are none of our events all the same."""
    try:
        return decode(found.packed)
    except msgspec.DecodeError as error:
        raise JournalError(
            f"{path} has a record of another version of this program ({error}): use that version for this run"
        ) from None


def written_later(path: Path, start: int, size: int) -> bool:
    """Whether a record in the first `size` bytes of a file was written after what is at `start` had been: then no crash
    has torn that.

    Through the page cache bytes become part of the file one after another, and any record behind `start` tells. Past
    the cache, the blocks of one append may reach the disk in any order; a record of a later append tells.
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
    """Where it is first, wholly between `start` and `end`; -1 if it is not."""
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
    """Of a segment file; each folder counts its own from 1."""
    return int(path.stem)


def path_of(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.wal"


def read_payload(folder: Path, extent: Extent) -> bytes:
    """Raises JournalError if it is not as it was written."""
    path = path_of(folder, extent.segment)
    try:
        with path.open("rb") as file:
            file.seek(extent.offset)
            data = file.read(extent.size)
    except OSError as error:
        raise JournalError(f"a payload of the journal can't be read ({error})") from error
    if len(data) < extent.size or xxhash.xxh3_64_intdigest(data) != extent.checksum:
        raise JournalError(f"{path} is damaged: the payload of {extent.size} bytes at byte {extent.offset}")
    return data


def write_first(path: Path, number: int, item: Item) -> None:
    """Make the file of that number, with one record, and look whether the disk has all of it. Raises OSError."""
    pieces, extent = _pieces(number, len(MAGIC), len(MAGIC), item)
    with path.open("wb") as file:
        file.writelines([MAGIC, *pieces])
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that it is the disk that is asked
    with path.open("rb") as file:
        found = _record_at(file, number, len(MAGIC))
        if not found or found.extent != extent or not _is_whole(file, extent):
            raise OSError(errno.EIO, "what was written is not what can be read", str(path))
