"""Cuts a state into blocks and segments: both sides compute this from the tensors and the size of a block.

A *block* is compared, encoded and checked as a whole; a *segment* is a part of it with one coding. A segment is a piece
of one tensor or, of tensors with one dimension or few elements, a run of them, which is sent as plain bytes if anything
in it has changed: such tensors change almost everywhere. Blocks tile the buffer, padding included, and every segment
begins at a word.

Weights that come in parts (`areal_like.weights.state`) have a layout per part. A process with only a part cuts it
exactly as one with the whole does: segments have their position in the whole, which the digest needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import xxhash

from areal_like.weights.state import TensorSpec, spans

MIN_COUNT = 4096
"""Below this many elements a tensor gets no coding of its own."""
BITS_OF: dict[int, type] = {8: np.uint8, 16: np.uint16, 32: np.uint32}
"""Width in bits → NumPy type."""


@dataclass(frozen=True)
class Segment:
    """Bytes [start, stop) of the buffer, padding included; in the whole weights its first word is number `first_word`.
    `count` elements of `width` bits; `plain`: a run of tensors, of which only the bytes matter."""

    start: int
    stop: int
    first_word: int
    count: int
    width: int
    plain: bool

    @property
    def nbytes(self) -> int:
        return self.count * self.width // 8

    def words(self, words: np.ndarray) -> np.ndarray:
        """Its part of the buffer's words."""
        return words[self.start // 8 : self.stop // 8]

    def bits(self, buffer: np.ndarray) -> np.ndarray:
        """Its elements' bits in a buffer."""
        return buffer[self.start : self.start + self.nbytes].view(BITS_OF[self.width])


@dataclass(frozen=True)
class Block:
    """`end`: the bytes of the layout's part that come before its end."""

    segments: tuple[Segment, ...]
    end: int


class Layout:
    """The blocks of a part of weights with these tensors, each of at most `block_bytes` (a multiple of 4096).

    The buffer is that of the whole weights or, with `apart`, one that has nothing but this part. Blocks are the same.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], block_bytes: int, part: int = 0, parts: int = 1, *, apart: bool = False
    ):
        if block_bytes < 4096 or block_bytes % 4096:
            raise ValueError(f"block_bytes must be a multiple of 4096, not {block_bytes}")
        self.specs, self.block_bytes, self._part = list(specs), block_bytes, (part, parts)
        self._apart = apart
        self.blocks: list[Block] = []
        self._open: list[Segment] = []
        self.nbytes = self._begin = 0
        for spec, offset in zip(specs, self._offsets, strict=True):
            self._add(spec, offset, *spec.cuts(parts)[part : part + 2])
        self._close()
        self._spans = [(0, self.nbytes)] if apart else spans(specs, part, parts)
        self._ends = list(accumulate(stop - start for start, stop in self._spans))

    @cached_property
    def key(self) -> int:
        """uint64: the same on both sides if the tensors and the cut are the same."""
        text = repr([(spec.name, spec.dtype, spec.shape) for spec in self.specs] + [self.block_bytes, *self._part])
        return xxhash.xxh3_64_intdigest(text.encode())

    def copy_out(self, buffer: np.ndarray, into: np.ndarray) -> None:
        """The part's bytes in a buffer, one after the other, into uint8 [nbytes]."""
        for (start, stop), end in zip(self._spans, self._ends, strict=True):
            into[end - (stop - start) : end] = buffer[start:stop]

    def copy_in(self, chunk: np.ndarray, offset: int, buffer: np.ndarray) -> None:
        """Bytes of the part that begin with number `offset`, to their places in a buffer."""
        place, done = bisect_right(self._ends, offset), 0
        while done < chunk.size:
            end, stop = self._ends[place], self._spans[place][1]
            length = min(chunk.size - done, end - offset - done)
            start = stop - (end - offset - done)
            buffer[start : start + length] = chunk[done : done + length]
            done, place = done + length, place + 1

    def pieces(self, segment: Segment) -> list[tuple[int, int, int]]:
        """Contents of a segment: of each tensor, by its place in the table, elements [start, stop), flat."""
        found, begin = [], 8 * segment.first_word
        end = begin + segment.stop - segment.start
        place = bisect_right(self._offsets, begin) - 1
        while place < len(self.specs) and self._offsets[place] < end:
            spec, offset = self.specs[place], self._offsets[place]
            start = max(0, begin - offset) // spec.itemsize
            stop = min(spec.count, (end - offset) // spec.itemsize)
            if start < stop:
                found.append((place, start, stop))
            place += 1
        return found

    @cached_property
    def _offsets(self) -> list[int]:
        """Offset in bytes of each tensor in the whole weights."""
        return list(accumulate([spec.space for spec in self.specs], initial=0))[:-1]

    def _add(self, spec: TensorSpec, offset: int, first: int, end: int) -> None:
        """Bytes [first, end) of a tensor that begins at `offset`."""
        width = 8 * spec.itemsize
        if len(spec.shape) < 2 or spec.count < MIN_COUNT:
            for start in range(first, end, self.block_bytes):
                length = min(self.block_bytes, end - start)
                self._put(offset + start, length, length, 8, True)
            return
        for start in range(first, end, self.block_bytes):
            length = min(self.block_bytes, end - start)
            count = (min(start + length, spec.nbytes) - start) // spec.itemsize
            self._put(offset + start, length, count, width, False)

    def _put(self, start: int, length: int, count: int, width: int, plain: bool) -> None:
        """Bytes of the whole weights, into the open block if there is room; plain ones join plain ones before them."""
        here = self.nbytes if self._apart else start
        if self._open and self.nbytes + length - self._begin > self.block_bytes:
            self._close()
        segment = Segment(here, here + length, start // 8, count, width, plain)
        self.nbytes += length
        if plain and self._open and (before := self._open[-1]).plain:
            joined = before.stop - before.start + length
            if 8 * before.first_word + joined == start + length:
                segment = Segment(before.start, here + length, before.first_word, joined, 8, True)
                self._open.pop()
        self._open.append(segment)

    def _close(self) -> None:
        if self._open:
            self.blocks.append(Block(tuple(self._open), self.nbytes))
            self._open = []
        self._begin = self.nbytes
