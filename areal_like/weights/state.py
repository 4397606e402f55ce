"""A model's weights as one flat byte buffer, and a table of each tensor's position. NumPy only.

bfloat16 and the 8-bit floats have no NumPy type: their bits are held as unsigned integers. Each tensor begins at a
multiple of `ALIGN` bytes, and bytes between two of them are zero. Equal bits mean an equal digest.

A learner of several ranks cuts every tensor by rows (FSDP), and publishes in *parts*: rank r's part has the whole words
that begin in its shard, so parts tile the weights, and numbers of words (changes, lanes) add up over parts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from areal_like.weights.digest import Lanes, lanes_of, text_of

BITS = {
    "bfloat16": np.uint16,
    "float16": np.uint16,
    "float32": np.uint32,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
    "uint8": np.uint8,
}
"""dtype name → NumPy type that holds its bits."""
ALIGN = 8


@dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @cached_property
    def itemsize(self) -> int:
        return np.dtype(BITS[self.dtype]).itemsize

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize

    @property
    def space(self) -> int:
        """Bytes in a state's buffer, with padding."""
        return -(-self.nbytes // ALIGN) * ALIGN

    def shards(self, ranks: int) -> list[int]:
        """The element with which each rank's shard begins, and the end, as torch.chunk cuts the rows."""
        rows = self.shape[0] if self.shape else 1
        each, row = -(-rows // ranks), self.count // max(1, rows)
        return [min(rows, rank * each) * row for rank in range(ranks)] + [self.count]

    def cuts(self, parts: int) -> list[int]:
        """The byte with which each part begins, and the end: whole words."""
        starts = [first * self.itemsize for first in self.shards(parts)]
        return [min(self.space, -(-start // ALIGN) * ALIGN) for start in starts]


def spans(specs: Sequence[TensorSpec], part: int, parts: int) -> list[tuple[int, int]]:
    """Byte ranges [start, stop) of a part in the whole weights; adjacent ranges are merged."""
    found, offset = list[tuple[int, int]](), 0
    for spec in specs:
        start, stop = (offset + cut for cut in spec.cuts(parts)[part : part + 2])
        offset += spec.space
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return found


class State:
    """A model's weights, or one of the `parts` of them, tensor by tensor in `buffer` (uint8 [nbytes]) in the order of
    `specs`, the table of the whole. Raises ValueError if a given `buffer` has another size or is not aligned."""

    in_place = False
    """Whether a learner overwrites this version by the next: otherwise two states take turns."""

    def __init__(self, specs: list[TensorSpec], buffer: np.ndarray | None = None, *, part: int = 0, parts: int = 1):
        self.specs, self.part, self.parts = specs, part, parts
        self.spans = spans(specs, part, parts)
        self.nbytes = sum(stop - start for start, stop in self.spans)
        self._hold(buffer)

    def _hold(self, buffer: np.ndarray | None) -> None:
        self.buffer: Any = np.zeros(self.nbytes, np.uint8) if buffer is None else buffer
        if self.buffer.nbytes != self.nbytes:
            raise ValueError(f"weights buffer holds {self.buffer.nbytes} bytes where the tensors need {self.nbytes}")
        if self.buffer.ctypes.data % ALIGN:
            raise ValueError(f"a weights buffer begins at a multiple of {ALIGN} bytes")

    @property
    def words(self) -> np.ndarray:
        """The buffer as uint64 [nbytes / 8]."""
        words: np.ndarray = self.buffer.view(np.uint64)
        return words

    def places(self) -> Iterator[tuple[TensorSpec, int, int]]:
        """(spec, the byte with which its elements that are here begin, and the byte with which they end)."""
        at = 0
        for spec in self.specs:
            first, end = spec.cuts(self.parts)[self.part : self.part + 2]
            yield spec, at, at + max(0, min(end, spec.nbytes) - first)  # a part may begin in the padding
            at += end - first

    def tensors(self) -> Iterator[tuple[TensorSpec, Any]]:
        """(spec, flat view of the bits of its elements that are here), to read or write."""
        for spec, start, stop in self.places():
            yield spec, self.buffer[start:stop].view(BITS[spec.dtype])

    def copy_out(self, start: int, stop: int, into: np.ndarray) -> None:
        """Copy these bytes of the buffer into an array."""
        into[:] = self.buffer[start:stop]

    def copy_in(self, start: int, chunk: np.ndarray) -> None:
        """Overwrite the bytes of the buffer from `start` on."""
        self.buffer[start : start + chunk.size] = chunk

    def lanes(self) -> Lanes:
        """The lanes of the digest, computed over all bits."""
        lanes, at = np.zeros(2, np.uint64), 0
        for start, stop in self.spans:
            lanes += self.swept(at, at + stop - start, start // ALIGN)
            at += stop - start
        return lanes

    def swept(self, start: int, stop: int, first_word: int) -> Lanes:
        """The lanes of these bytes of the buffer, which begin with this word of the whole weights."""
        return lanes_of(self.words[start // ALIGN : stop // ALIGN], first_word)

    def digest(self) -> str:
        return text_of(self.lanes(), self.nbytes // ALIGN)
