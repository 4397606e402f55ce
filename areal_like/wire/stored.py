"""A payload in memory, in a file of the journal, or both."""

from collections.abc import Callable
from typing import NamedTuple


class Extent(NamedTuple):
    """Place of a payload: number of the file, offset of its first byte, size in bytes, and xxh3-64."""

    segment: int
    offset: int
    size: int
    checksum: int


Bytes = bytes | memoryview
Read = Callable[[Extent], Bytes]


class Stored:
    """A payload in the journal. `extent`: its place (None: not written yet). `data`: its bytes, if in memory too."""

    __slots__ = ("_read", "data", "extent", "size")

    def __init__(self, read: Read | None, *, data: Bytes | None = None, extent: Extent | None = None):
        self._read, self.data, self.extent = read, data, extent
        self.size = extent.size if extent else len(data or b"")

    def __len__(self) -> int:
        return self.size

    def load(self) -> Bytes:
        """Its bytes. Raises JournalError, OSError if the journal no longer has them."""
        if self.data is not None:
            return self.data
        assert self._read and self.extent
        return self._read(self.extent)


Payload = Bytes | Stored
"""A payload as the buffer holds it. Without a journal, or before the append: the bytes themselves."""


def load(payload: Payload) -> Bytes:
    """The bytes of a payload, from memory or from the journal."""
    return payload.load() if isinstance(payload, Stored) else payload
