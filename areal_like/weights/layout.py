"""Cuts a state into blocks and segments: both sides compute this from the tensors and the size of a block.

A *block* is compared, encoded and checked as a whole; a *segment* is a piece of one tensor in it, with one coding.
Tensors with one dimension or few elements are sent as plain bytes. Blocks tile the buffer, padding included, and every
segment begins at a word. Weights that come in parts (`weights.state`) have a layout per part; segments have their
position in the whole, which the digest needs."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import xxhash

from areal_like.weights.state import State, TensorSpec, spans

MIN_COUNT = 4096
"""Below this many elements a tensor gets no coding of its own."""


@dataclass(frozen=True)
class Segment:
    """Bytes [start, stop) of the buffer, padding included; in the whole weights its first word is number `first_word`.
    `count` elements of `width` bits of one `tensor` (its place in the table), from `first` on. `plain`: sent as it is,
    if anything in it has changed."""

    start: int
    stop: int
    first_word: int
    tensor: int
    first: int
    count: int
    width: int
    plain: bool

    @property
    def nbytes(self) -> int:
        return self.count * self.width // 8

    @property
    def mask_words(self) -> int:
        return -(-self.count // 64)

    def words(self, words: np.ndarray) -> np.ndarray:
        return words[self.start // 8 : self.stop // 8]

    def bits(self, buffer: np.ndarray) -> np.ndarray:
        return buffer[self.start : self.start + self.nbytes].view(f"u{self.width // 8}")


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
        self.specs, self.block_bytes, self._apart = list(specs), block_bytes, apart
        text = repr([(spec.name, spec.dtype, spec.shape) for spec in specs] + [block_bytes, part, parts])
        self.key = xxhash.xxh3_64_intdigest(text.encode())
        """uint64: the same on both sides if the tensors and the cut are the same."""
        self.blocks: list[Block] = []
        self.nbytes = self._closed = offset = 0
        found: list[Segment] = []  # of the open block
        for tensor, spec in enumerate(specs):
            first, end = spec.cuts(parts)[part : part + 2]
            for begin in range(first, end, block_bytes):
                length = min(block_bytes, end - begin)
                if found and self.nbytes + length - self._closed > block_bytes:
                    self._close(found)
                found.append(self._segment(tensor, spec, offset, begin, length))
                self.nbytes += length
            offset += spec.space
        self._close(found)
        self.spans = [(0, self.nbytes)] if apart else spans(specs, part, parts)
        self._ends = list(accumulate(stop - start for start, stop in self.spans))

    def copy_out(self, state: State, into: np.ndarray) -> None:
        """The part's bytes in a state, one after the other, into uint8 [nbytes]."""
        for (start, stop), end in zip(self.spans, self._ends, strict=True):
            state.copy_out(start, stop, into[end - (stop - start) : end])

    def copy_in(self, chunk: np.ndarray, offset: int, state: State) -> None:
        """Bytes of the part that begin with number `offset`, to their places in a state."""
        place, done = bisect_right(self._ends, offset), 0
        while done < chunk.size:
            left = self._ends[place] - offset - done  # of the span
            length, stop = min(chunk.size - done, left), self.spans[place][1]
            state.copy_in(stop - left, chunk[done : done + length])
            done, place = done + length, place + 1

    def _segment(self, tensor: int, spec: TensorSpec, offset: int, begin: int, length: int) -> Segment:
        """`length` bytes, from `begin` on, of a tensor that begins at `offset` in the whole weights."""
        start = self.nbytes if self._apart else offset + begin
        count = (min(begin + length, spec.nbytes) - begin) // spec.itemsize
        plain, width = len(spec.shape) < 2 or spec.count < MIN_COUNT, 8 * spec.itemsize
        word, first = (offset + begin) // 8, begin // spec.itemsize
        return Segment(start, start + length, word, tensor, first, count, width, plain)

    def _close(self, found: list[Segment]) -> None:
        if found:
            self.blocks.append(Block(tuple(found), self.nbytes))
        found.clear()
        self._closed = self.nbytes
