"""Weights before and after → coded blocks, and coded blocks → weights after. Keeps the digest's lanes up to date.

Per segment the smallest coding is taken: nothing if nothing has changed; gaps and steps for few changes; a mask and
steps for more (the two meet near a twelfth, both compressed); the bits themselves where steps are so many and large
that bits are shorter, or, to save time, above a density of `dense_above`.

NumPy is the truth; for large states compiled kernels do the same. They choose between gaps, a mask or neither from a
sample, so a dense update costs little more than a copy; the result is exact for any choice. Drivers: the publisher's
thread encodes block by block, the actor's replica applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from areal_like.weights import plain
from areal_like.weights.digest import kernels_for, lanes_of
from areal_like.weights.layout import Block, Layout, Segment
from areal_like.weights.planes import DENSE, GAPS, MASK, SKIP, Coded, mask_words, parts_of

GAPS_BELOW = 1 / 12
"""Density up to which gaps are shorter than a mask."""
_SAMPLES, _SAMPLE = 8, 1024
_SLACK = 8192
"""Elements by which kernels may go beyond a limit before they stop."""


Tracked = tuple[tuple[np.ndarray, np.ndarray], int, NDArray[np.uint64]]
"""A segment's words before and after, the place of its first one (-1: lanes are not kept), the change of its lanes."""


class Lanes:
    """The digest's lanes of each segment of a layout (uint64 [segments, 2]): they add up to those of the whole."""

    def __init__(self, layout: Layout, words: np.ndarray):
        self._place = {segment: i for i, segment in enumerate(s for block in layout.blocks for s in block.segments)}
        self.of: NDArray[np.uint64] = np.zeros((len(self._place), 2), np.uint64)
        for segment in self._place:
            self.sweep(segment, words)

    def sweep(self, segment: Segment, words: np.ndarray) -> None:
        """Compute them again, from the segment's bits in a state's words."""
        self.of[self._place[segment]] = lanes_of(segment.words(words), segment.first_word)

    def row(self, segment: Segment) -> NDArray[np.uint64]:
        row: NDArray[np.uint64] = self.of[self._place[segment]]
        return row

    def total(self) -> NDArray[np.uint64]:
        total: NDArray[np.uint64] = self.of.sum(axis=0, dtype=np.uint64)
        return total


@dataclass(slots=True)
class _Scratch:
    """Output arrays of the kernels for one block; `fill` int64 [4]: how far gaps, far, short and big are filled."""

    gaps: np.ndarray
    far: np.ndarray
    masks: np.ndarray
    short: np.ndarray
    big: np.ndarray
    fill: np.ndarray


class Encoder:
    """Encodes block after block of `layout`. Not for several threads at once."""

    def __init__(self, layout: Layout, dense_above: float = 1.0):
        self.layout, self._dense_above = layout, dense_above
        self._kernels = kernels_for(layout.nbytes)
        self._scratch: _Scratch | None = None
        self._masked = 0

    def encode(self, block: Block, old: np.ndarray, new: np.ndarray, lanes: Lanes | None = None) -> Coded:
        """`old`, `new`: uint8, whole buffers of two states. `lanes` of the old one become those of the new one."""
        n = len(block.segments)
        coded = Coded(np.zeros(n, np.uint8), np.zeros(n, np.uint32))
        parts = [self._begin(block)] if self._kernels else []
        body: list[np.ndarray] = []
        collected: list[tuple[np.ndarray, ...]] = []
        for i, segment in enumerate(block.segments):
            before, after = segment.bits(old), segment.bits(new)
            words = segment.words(old.view(np.uint64)), segment.words(new.view(np.uint64))
            tracked: Tracked = (words, -1 if lanes is None else segment.first_word, np.zeros(2, np.uint64))
            if segment.plain:
                coding, changes = (SKIP if np.array_equal(*words) else DENSE), 0
            elif self._kernels:
                coding, changes = self._steps(parts[0], segment, before, after, tracked)
            else:
                coding, changes, planes = self._steps_plainly(segment, before, after)
                collected.append(planes)
            coded.codings[i], coded.changes[i] = coding, changes
            if coding == DENSE:
                body.append(segment.bits(new).view(np.uint8))
            if lanes is not None and coding != SKIP:
                if coding == GAPS and self._kernels:
                    lanes.row(segment)[:] += tracked[2]
                else:
                    lanes.sweep(segment, new.view(np.uint64))
        coded.body = body
        return self._with_planes(coded, parts, collected)

    def _with_planes(self, coded: Coded, parts: list[_Scratch], collected: list[tuple[np.ndarray, ...]]) -> Coded:
        if parts:
            k, f, c, b = parts[0].fill
            coded.gaps, coded.far, coded.short, coded.big = (
                parts[0].gaps[:k], parts[0].far[:f], parts[0].short[:c], parts[0].big[:b],
            )  # fmt: skip
            coded.masks = parts[0].masks[: self._masked]
        elif collected:
            planes = [np.concatenate(each) for each in zip(*collected, strict=True)]
            coded.gaps, coded.far, coded.masks, coded.short, coded.big = planes
        return coded

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _steps_plainly(
        self, segment: Segment, before: np.ndarray, after: np.ndarray
    ) -> tuple[int, int, tuple[np.ndarray, ...]]:
        """Coding, changes, and this segment's part of each plane."""
        places = np.flatnonzero(before != after)
        if places.size > segment.count * self._dense_above:
            return DENSE, 0, no_planes()
        codes = plain.steps(before[places], after[places])
        if places.size > segment.count * GAPS_BELOW and not _fits(segment, places.size, escapes_of(codes)):
            return DENSE, 0, no_planes()
        return code_steps(segment, places, codes)

    def _begin(self, block: Block) -> _Scratch:
        """Room for any block of the layout."""
        if self._scratch is None:
            most = [sum(s.count for s in each.segments if not s.plain) for each in self.layout.blocks]
            count = max(most, default=0)
            gaps, codes = int(count * GAPS_BELOW) + _SLACK, int(count * max(self._dense_above, GAPS_BELOW)) + _SLACK
            masks = count // 64 + max(len(each.segments) for each in self.layout.blocks)
            self._scratch = _Scratch(
                np.empty(gaps, np.uint8), np.empty(gaps, np.uint32), np.empty(masks, np.uint64),
                np.empty(codes, np.uint8), np.empty(codes, np.uint32), np.zeros(4, np.int64),
            )  # fmt: skip
        self._scratch.fill[:] = self._masked = 0
        return self._scratch

    def _steps(
        self, into: _Scratch, segment: Segment, before: np.ndarray, after: np.ndarray, tracked: Tracked
    ) -> tuple[int, int]:
        (old_words, new_words), first, sums = tracked
        assert self._kernels
        guess, escapes = sampled(before, after)
        most = int(segment.count * min(self._dense_above, 1.0))
        limit = min(int(segment.count * GAPS_BELOW), most)
        if guess <= 1.2 * GAPS_BELOW:
            changes = self._kernels.encode_gaps(
                before, after, old_words, new_words, first, limit, into.gaps, into.far, into.short, into.big,
                into.fill, sums,
            )  # fmt: skip
            if changes >= 0:
                return (GAPS if changes else SKIP), changes
        if guess <= 1.1 * self._dense_above and _mask_bytes(segment, guess, escapes) < 1.1 * segment.width / 8:
            words, kept = mask_words(segment), into.fill.copy()
            mask = into.masks[self._masked : self._masked + words]
            changes = self._kernels.encode_mask(before, after, most, mask, into.short, into.big, into.fill)
            if changes > 0 and _fits(segment, changes, int(into.fill[3] - kept[3])):
                self._masked += words
                return MASK, changes
            into.fill[:] = kept
            if changes == 0:
                return SKIP, 0
        return DENSE, 0


def no_planes() -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(0, kind) for kind in (np.uint8, np.uint32, np.uint64, np.uint8, np.uint32))


def code_steps(segment: Segment, places: np.ndarray, codes: np.ndarray) -> tuple[int, int, tuple[np.ndarray, ...]]:
    """Changes at `places` → coding (gaps or mask), their number, and the segment's part of each plane."""
    if not places.size:
        return SKIP, 0, no_planes()
    short, big = plain.encode_codes(codes)
    _, nothing, no_mask, _, _ = no_planes()
    if places.size <= int(segment.count * GAPS_BELOW):
        return GAPS, places.size, (*plain.encode_gaps(places), no_mask, short, big)
    mask = plain.encode_mask(places, segment.count)
    return MASK, places.size, (nothing.view(np.uint8), nothing, mask, short, big)


def escapes_of(codes: np.ndarray) -> int:
    return int(np.count_nonzero(codes >= plain.ESCAPE_CODE))


def _fits(segment: Segment, changes: int, escapes: int) -> bool:
    """Is a mask with steps shorter than the bits, before compression?"""
    return _mask_bytes(segment, changes / segment.count, escapes / segment.count) < segment.width / 8


def _mask_bytes(segment: Segment, density: float, escapes: float) -> float:
    """Estimated uncompressed bytes per element of mask coding."""
    return 1 / 8 + density / 2 + escapes * segment.width / 8


def sampled(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """The shares of changes, and of steps too large for a short code, in a few stretches spread over the segment."""
    step = max(_SAMPLE, before.size // _SAMPLES)
    pieces = [slice(start, start + _SAMPLE) for start in range(0, before.size, step)]
    old, new = (np.concatenate([each[piece] for piece in pieces]) for each in (before, after))
    changed = old != new
    codes = plain.steps(old[changed], new[changed])
    return codes.size / max(1, old.size), escapes_of(codes) / max(1, old.size)


def apply(block: Block, coded: Coded, buffer: np.ndarray, lanes: Lanes | None = None) -> None:
    """Bring a state's buffer (uint8) from before to after a block that `planes.unpack` has accepted."""
    kernels, words = kernels_for(buffer.nbytes), buffer.view(np.uint64)
    rows = list(zip(block.segments, coded.codings.tolist(), coded.changes.tolist(), strict=True))
    for segment, coding, parts in parts_of(rows, coded):
        bits = segment.bits(buffer)
        if kernels and coding != DENSE:
            _apply_fast(kernels, segment, coding, parts, bits, words, lanes)
            continue
        if coding == DENSE:
            bits.view(np.uint8)[:] = parts[0]
        else:
            places = plain.decode_gaps(parts[0], parts[1]) if coding == GAPS else plain.decode_mask(parts[0])
            bits[places] = plain.stepped(bits[places], plain.decode_codes(parts[-2], parts[-1]))
        if lanes is not None:
            lanes.sweep(segment, words)


def _apply_fast(
    kernels: ModuleType,
    segment: Segment,
    coding: int,
    parts: Sequence[np.ndarray],
    bits: np.ndarray,
    words: np.ndarray,
    lanes: Lanes | None,
) -> None:
    first = -1 if lanes is None else segment.first_word
    row = np.zeros(2, np.uint64) if lanes is None else lanes.row(segment)
    if coding == GAPS:
        kernels.apply_gaps(bits, segment.words(words), first, *parts, row)
    else:
        kernels.apply_mask(bits, *parts)
        if lanes is not None:
            lanes.sweep(segment, words)
