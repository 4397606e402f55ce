"""Payloads that the buffer holds: their bytes, or where these lie in the journal, to be read when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn


class JournalError(ValueError):
    """A journal that can't be read: damaged in the middle, or not a journal. Or a record that is too large for one."""


class Extent(NamedTuple):
    """Where a payload lies: the number of the segment file, its first byte there, its bytes, and their xxh3-64."""

    segment: int
    offset: int
    size: int
    checksum: int


Bytes = bytes | memoryview
Read = Callable[[Extent], Bytes]


def cannot_read(extent: Extent) -> NoReturn:
    """In place of a reader, where no snapshot is expected to name payloads."""
    raise JournalError(f"nobody can read the payload at {extent}")


class Stored:
    """A payload that the journal was given. `extent` is None until it has been written; `data` are its bytes, while
    they are in memory as well: they are not after a resume."""

    __slots__ = ("_read", "data", "extent", "size")

    def __init__(self, read: Read, *, data: Bytes | None = None, extent: Extent | None = None):
        self._read, self.data, self.extent = read, data, extent
        self.size = extent.size if extent else len(data or b"")

    def __len__(self) -> int:
        return self.size

    def load(self) -> Bytes:
        """Its bytes. Raises JournalError, OSError if the journal does not have them any more."""
        if self.data is not None:
            return self.data
        assert self.extent is not None
        return self._read(self.extent)


Payload = Bytes | Stored
"""As an entry holds it: without a journal, or before it is told, these are the bytes themselves."""


def load(payload: Payload) -> Bytes:
    """The bytes of a payload, wherever they are."""
    return payload.load() if isinstance(payload, Stored) else payload
