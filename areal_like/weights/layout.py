"""How a state is cut into blocks and segments: both sides work it out from the tensors and the size of a block.

A *block* is what is compared, encoded and checked as a whole; a *segment* is a part of it that gets one coding. A
segment is a piece of one tensor or, of tensors with one dimension or few elements, a run of them, which is sent as
plain bytes if anything in it has changed: such tensors change almost everywhere. Blocks tile the buffer, padding
included, and every segment begins at a word.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import xxhash

from areal_like.weights.state import BITS, TensorSpec

MIN_COUNT = 4096
"""Elements below which a tensor is not worth a coding of its own."""
BITS_OF: dict[int, type] = {8: np.uint8, 16: np.uint16, 32: np.uint32}
"""Width in bits → NumPy type."""


@dataclass(frozen=True)
class Segment:
    """Bytes [start, stop) of the buffer, padding included. `count` elements of `width` bits; `plain`: a run of tensors,
    of which only the bytes matter."""

    start: int
    stop: int
    count: int
    width: int
    plain: bool

    @property
    def first_word(self) -> int:
        return self.start // 8

    @property
    def nbytes(self) -> int:
        return self.count * self.width // 8

    def words(self, words: np.ndarray) -> np.ndarray:
        """Its part of the state's words."""
        return words[self.start // 8 : self.stop // 8]

    def bits(self, buffer: np.ndarray) -> np.ndarray:
        """Its elements' bits in a state's buffer."""
        return buffer[self.start : self.start + self.nbytes].view(BITS_OF[self.width])


@dataclass(frozen=True)
class Block:
    segments: tuple[Segment, ...]

    @property
    def start(self) -> int:
        return self.segments[0].start

    @property
    def stop(self) -> int:
        return self.segments[-1].stop


class Layout:
    """The blocks of a state with these tensors, each of at most `block_bytes` (a multiple of 4096)."""

    def __init__(self, specs: Sequence[TensorSpec], block_bytes: int):
        if block_bytes < 4096 or block_bytes % 4096:
            raise ValueError(f"block_bytes must be a multiple of 4096, not {block_bytes}")
        self.specs, self.block_bytes = list(specs), block_bytes
        self.blocks: list[Block] = []
        self._open: list[Segment] = []
        offset = 0
        for spec in specs:
            self._add(spec, offset)
            offset += spec.space
        self._close()
        self.nbytes = offset

    @cached_property
    def key(self) -> int:
        """uint64: the same on both sides if the tensors and the cut are the same."""
        text = repr([(spec.name, spec.dtype, spec.shape) for spec in self.specs] + [self.block_bytes])
        return xxhash.xxh3_64_intdigest(text.encode())

    def pieces(self, segment: Segment) -> list[tuple[int, int, int]]:
        """What a segment holds: of each tensor, by its place in the table, elements [start, stop), flat."""
        found = []
        place = bisect_right(self._offsets, segment.start) - 1
        while place < len(self.specs) and self._offsets[place] < segment.stop:
            spec, offset = self.specs[place], self._offsets[place]
            start = max(0, segment.start - offset) // spec.itemsize
            stop = min(spec.count, (segment.stop - offset) // spec.itemsize)
            if start < stop:
                found.append((place, start, stop))
            place += 1
        return found

    @cached_property
    def _offsets(self) -> list[int]:
        """Where each tensor begins, in bytes."""
        return list(accumulate([spec.space for spec in self.specs], initial=0))[:-1]

    def _add(self, spec: TensorSpec, offset: int) -> None:
        width = 8 * np.dtype(BITS[spec.dtype]).itemsize
        if len(spec.shape) < 2 or spec.count < MIN_COUNT:
            for start in range(0, spec.space, self.block_bytes):
                length = min(self.block_bytes, spec.space - start)
                self._put(Segment(offset + start, offset + start + length, length, 8, True))
            return
        most = self.block_bytes * 8 // width
        for start in range(0, spec.count, most):
            count = min(most, spec.count - start)
            begin = offset + start * width // 8
            end = offset + spec.space if start + count == spec.count else begin + count * width // 8
            self._put(Segment(begin, end, count, width, False))

    def _put(self, segment: Segment) -> None:
        """Into the open block, if there is room; a plain one joins the plain one before it."""
        if segment.start == segment.stop:
            return
        if self._open and segment.stop - self._open[0].start > self.block_bytes:
            self._close()
        if segment.plain and self._open and self._open[-1].plain:
            before = self._open.pop()
            segment = Segment(before.start, segment.stop, segment.stop - before.start, 8, True)
        self._open.append(segment)

    def _close(self) -> None:
        if self._open:
            self.blocks.append(Block(tuple(self._open)))
            self._open = []
