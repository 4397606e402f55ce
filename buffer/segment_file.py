"""The bytes of one file of the journal: payloads and where they are, the format of a record, how to append and read.

A file is `MAGIC` and then records, little-endian:

    [mark 4][bytes of the fields u32][bytes of the payload u64][xxh3-64 of the payload][durable u64]
    [xxh3-64 of the head so far and the fields, seeded with the file's number and the place][fields: msgpack][payload]

Mark and checksum fit only this place of this file. `durable`: everything before that byte was in the file before this
record was written. So an intact record whose `durable` lies beyond a damaged one proves that no crash has torn it.
"""

import errno
import os
import struct
from collections import deque
from collections.abc import Generator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

from areal_like.wire.stored import Bytes, Extent, Payload, Stored, load

FORMAT = 16
"""Version of the records (`buffer.events`) and of their layout in a file. A run of another format is refused."""
MAGIC = b"areal-journal-%d\n" % FORMAT
MAX_FIELDS_BYTES, MAX_PAYLOAD_BYTES = 1 << 30, 1 << 32
_MARK = b"\xd7JR\x04"
_HEAD = struct.Struct("<4sIQQQ")
_CHECK = struct.Struct("<Q")
_HEAD_BYTES = _HEAD.size + _CHECK.size
_MAX_PIECES = 1024  # the most that Linux takes in one call
_READ_BYTES = 1 << 20


class JournalError(ValueError):
    """The journal can't be read: it is damaged, or not a journal. Or a record is too large for it."""


Item = tuple[bytes, Payload]
"""What to append: the event's bytes, and the payload."""


def check_size(item: Item) -> Item:
    """Returns the item. Raises JournalError if it is too large for a reader."""
    for part, most in zip(item, (MAX_FIELDS_BYTES, MAX_PAYLOAD_BYTES), strict=True):
        if len(part) > most:
            raise JournalError(f"a record: got a part of {len(part)} bytes, expected at most {most}")
    return item


def _checksum(number: int, at: int, data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data, seed=(number << 40 ^ at) & (1 << 64) - 1)


class SegmentFile:
    """Appends to `path`, file `number`, which `new` creates. `sync`: records survive a power cut. Raises OSError."""

    def __init__(self, path: Path, number: int, *, sync: bool, new: bool = False):
        self._file = path.open("xb" if new else "r+b", buffering=0)
        self._number, self.sync = number, sync
        self._end = self._file.seek(0, os.SEEK_END)
        if new:
            self._write([memoryview(MAGIC)])

    def append(self, items: Sequence[Item]) -> None:
        """Append all items and set their payloads' `extent`. Raises OSError (disk full, ...): the file is unchanged."""
        pieces: list[Bytes] = []
        extents: list[Extent] = []
        end = self._end
        for fields, payload in ((fields, load(payload)) for fields, payload in items):
            durable = self._end if self.sync else end  # the page cache takes bytes in order
            checksum = xxhash.xxh3_64_intdigest(payload)
            head = _HEAD.pack(_MARK, len(fields), len(payload), checksum, durable)
            pieces += [head + _CHECK.pack(_checksum(self._number, end, head + fields)) + fields, payload]
            extents.append(Extent(self._number, end + _HEAD_BYTES + len(fields), len(payload), checksum))
            end = extents[-1].offset + len(payload)
        self._write([memoryview(piece).cast("B") for piece in pieces if len(piece)])
        for (_, held), extent in zip(items, extents, strict=True):
            if isinstance(held, Stored):
                held.extent = extent

    def _write(self, views: Sequence[memoryview]) -> None:
        """Write all views, or nothing and raise OSError."""
        left, size = deque(views), sum(map(len, views))
        try:
            while left:  # the kernel may take a part at a time
                written = os.writev(self._file.fileno(), list(islice(left, _MAX_PIECES)))
                while left and written >= len(left[0]):
                    written -= len(left.popleft())
                if written:
                    left[0] = left[0][written:]
            if self.sync:
                getattr(os, "fdatasync", os.fsync)(self._file.fileno())
        except OSError:
            self._file.seek(self._end)
            self._file.truncate()
            raise
        self._end += size

    def close(self) -> None:
        self._file.close()


def check_first(path: Path, number: int, fields: bytes) -> None:
    """Check that the disk has the first record of a file, one without payload. Raises OSError."""
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):  # so that the read below comes from the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = _record_at(file, number, len(MAGIC))
        if not found or found.fields != fields:
            raise OSError(errno.EIO, "the file reads back with other bytes than were written", str(path))


def read(path: Path, *, check: bool = True) -> Generator[tuple[bytes, Extent], None, tuple[int, int]]:
    """Yields (fields, place of the payload) of the records of segment file `path`. Returns where the last intact record
    ends, and the file's size. Without `check`, damaged payloads show at their load. Raises JournalError for another
    format."""
    with path.open("rb") as file:
        size, magic = os.fstat(file.fileno()).st_size, file.read(len(MAGIC))
        if magic != MAGIC:
            if len(magic) == len(MAGIC) and magic.startswith(b"areal-journal"):
                got, ours = magic.split(b"\n")[0].decode(errors="replace"), MAGIC.decode().strip()
                raise JournalError(f"{path}: got {got}, expected {ours}; another version wrote this run")
            return 0, size
        good, number = len(MAGIC), number_of(path)
        while found := _record_at(file, number, good):
            end = found.extent.offset + found.extent.size
            if end > size or (check and not _is_whole(file, found.extent)):
                break
            good = end
            yield found.fields, found.extent
        return good, size


def written_later(path: Path, start: int, size: int) -> bool:
    """Was an intact record in the first `size` bytes of a file written after the bytes at `start` were complete?"""
    number = number_of(path)
    with path.open("rb") as file:
        data = file.read(size)
        at = start
        while (at := data.find(_MARK, at + 1)) >= 0:
            found = _record_at(file, number, at)
            if found and start < found.durable and found.extent.offset <= size:
                return True
    return False


class _Found(NamedTuple):
    """A record whose head and fields are intact; `durable`: see the top."""

    fields: bytes
    extent: Extent
    durable: int


def _record_at(file: BinaryIO, number: int, at: int) -> _Found | None:
    """The record at byte `at` of file `number`, its payload unread; None if there is none."""
    file.seek(at)
    head = file.read(_HEAD_BYTES)
    if len(head) < _HEAD_BYTES or not head.startswith(_MARK):
        return None
    _, length, size, checksum, durable = _HEAD.unpack_from(head)
    fields = file.read(length) if length <= MAX_FIELDS_BYTES else b""
    (check,) = _CHECK.unpack_from(head, _HEAD.size)
    if _checksum(number, at, head[: _HEAD.size] + fields) != check:
        return None
    return _Found(fields, Extent(number, at + _HEAD_BYTES + length, size, checksum), durable)


def _is_whole(file: BinaryIO, extent: Extent) -> bool:
    file.seek(extent.offset)
    left, checksum = extent.size, xxhash.xxh3_64()
    while left and (piece := file.read(min(left, _READ_BYTES))):
        checksum.update(piece)
        left -= len(piece)
    return not left and checksum.intdigest() == extent.checksum


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


def number_of(path: Path) -> int:
    """The number of a segment file; each folder counts from 1."""
    return int(path.stem)


def path_of(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.wal"
