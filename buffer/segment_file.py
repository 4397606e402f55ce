"""The bytes of one file of the journal: how a record stands in it, how records are appended, and how they are read.

A file is `MAGIC` and then records: `[length u32][xxh3-64 u64][bytes of the msgpack part u32][kind and fields as
msgpack, then the payload]`, little-endian. What is appended at once is there as a whole or, after an error, not at all.

A file that is to survive a power cut is written past the page cache (O_DIRECT, several times as fast here as writing
through it and having it flushed). That goes by whole blocks, so each append ends with a record of padding; no block is
written twice, and a torn write can't reach what was durable before. Where the file system can't do that, or nobody
asked for it, the page cache is used.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import xxhash

MAGIC = b"areal-journal-3\n"  # the number is that of the format
PADDING = "padding"
MAX_RECORD_BYTES = 1 << 31
_HEAD = struct.Struct("<IQI")  # bytes that follow, their checksum, bytes of the msgpack part
_FORGET_BYTES = 4 << 20
_MAX_PIECES = 1024  # that Linux takes in one call
_BLOCK = 4096
_ROOM_BYTES = 4 << 20


class JournalError(ValueError):
    """A journal that can't be read: damaged in the middle, or not a journal."""


@dataclass(frozen=True, slots=True)
class Record:
    kind: str
    fields: list[Any]
    payload: bytes = b""


def pack(kind: str, fields: list[Any], payload: Any = b"") -> tuple[bytes, Any]:
    """A record as it stands in the file, in two pieces: the second one is the payload, not copied."""
    header = msgpack.packb([kind, fields])
    checksum = xxhash.xxh3_64(header, seed=len(header))
    checksum.update(payload)
    return _HEAD.pack(len(header) + len(payload), checksum.intdigest(), len(header)) + header, payload


def padding(size: int) -> tuple[bytes, bytes]:
    """A record that ends on a block, for a file of `size` bytes; ("", "") if it ends on one."""
    if size % _BLOCK == 0:
        return b"", b""
    empty = len(pack(PADDING, [])[0])
    return pack(PADDING, [], bytes((-size - empty) % _BLOCK))  # type: ignore[return-value]


class SegmentFile:
    """Appends to `path`, which is made if `new`. `sync`: what is appended survives a power cut. Raises OSError."""

    def __init__(self, path: Path, *, sync: bool, new: bool = False):
        self._file = path.open("xb" if new else "r+b", buffering=0)
        self._sync = sync
        self._end = self._file.seek(0, os.SEEK_END)
        self._forgotten = 0
        self._direct = -1
        if new:
            self.append([MAGIC])
        if sync and (direct := _open_direct(path)) >= 0:
            self.append([piece for piece in padding(self._end) if piece])
            self._direct, self._room = direct, mmap.mmap(-1, _ROOM_BYTES)

    def append(self, pieces: Sequence[Any]) -> None:
        """All of them. Raises OSError (disk full, ...): then the file is as it was."""
        views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        size = sum(map(len, views))
        try:
            if self._direct >= 0:
                views += [memoryview(piece) for piece in padding(size)]
                self._past_the_cache(views)
                size = sum(map(len, views))
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


def written_later(path: Path, start: int, kinds: Sequence[str]) -> bool:
    """Whether records behind a bad one at `start` were appended after it was durable.

    In a file that was written through the page cache any whole record tells that. Past the cache, the blocks of one
    append may reach the disk in any order; a record tells if it follows padding, which ends an append.
    """
    if path.stat().st_size == 0:
        return False
    names = b"|".join(re.escape(msgpack.packb(kind)) for kind in (PADDING, *kinds))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        at = [match.start() - _HEAD.size for match in re.finditer(b"\x92(?:" + names + b")", data)]
        whole = {begin: end for begin in at if begin >= 0 and (end := _end_of(data, begin)) is not None}
        ends = {
            end
            for begin, end in whole.items()
            if data[begin + _HEAD.size + 1 : begin + _HEAD.size + 9] == msgpack.packb(PADDING)
        }
    if start in whole:
        return False  # it is being written: this is a run that lives
    later = {begin for begin in whole if begin > start}
    return bool(later & {end for end in ends if end > start} if ends else later)


def _end_of(data: mmap.mmap, begin: int) -> int | None:
    """Where the record at `begin` ends; None if it is not whole."""
    length, checksum, header_length = _HEAD.unpack_from(data, begin)
    start, end = begin + _HEAD.size, begin + _HEAD.size + length
    if header_length > length or end > len(data):
        return None
    with memoryview(data) as view, view[start:end] as body:
        return end if xxhash.xxh3_64_intdigest(body, seed=header_length) == checksum else None


def read(path: Path) -> Generator[Record, None, int]:
    """Yields the records; returns where the last good one ends. Raises JournalError for another format."""
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
        if magic != MAGIC:
            if len(magic) == len(MAGIC) and magic.startswith(MAGIC.partition(b"3")[0]):
                raise JournalError(f"{path} was written by another version of this program: resume with that one")
            return 0
        good = len(MAGIC)
        while True:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return good
            length, checksum, header_length = _HEAD.unpack(head)
            if length > MAX_RECORD_BYTES or header_length > length:
                return good
            body = file.read(length)
            if len(body) < length or xxhash.xxh3_64_intdigest(body, seed=header_length) != checksum:
                return good
            kind, fields = msgpack.unpackb(body[:header_length], strict_map_key=False)
            good += _HEAD.size + length
            if kind != PADDING:
                yield Record(kind, fields, body[header_length:])
