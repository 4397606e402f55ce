"""Weights before and after → coded blocks, and coded blocks → weights after. Keeps the digest's lanes up to date.

Per segment the smallest coding is taken: nothing if nothing has changed; gaps and steps for few changes; a mask and
steps for more (from about a twelfth); the bits themselves where steps are many and large. NumPy (`weights.plain`) is
the truth; for large states compiled kernels do the same, which choose from a sample: exact for any choice."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from areal_like.weights import plain
from areal_like.weights.digest import kernels_for, lanes_of
from areal_like.weights.layout import Block, Layout, Segment
from areal_like.weights.planes import DENSE, GAPS, MASK, SKIP, Coded, Part

GAPS_BELOW = 1 / 12
"""Density up to which gaps are shorter than a mask."""
SAMPLES, SAMPLE = 8, 1024
"""Stretches of a segment that compiled kernels look at first, and elements of each."""
_SLACK = 8192
"""Elements by which kernels may go beyond a limit before they stop."""


class Lanes:
    """The digest's lanes of each segment of a layout (uint64 [segments, 2]): they add up to those of the whole."""

    def __init__(self, layout: Layout, words: np.ndarray):
        self._place = {segment: i for i, segment in enumerate(s for block in layout.blocks for s in block.segments)}
        self.of: NDArray[np.uint64] = np.zeros((len(self._place), 2), np.uint64)
        for segment in self._place:
            self.sweep(segment, words)

    def sweep(self, segment: Segment, words: np.ndarray) -> None:
        """Compute them again, from a state's words."""
        self.row(segment)[:] = lanes_of(segment.words(words), segment.first_word)

    def row(self, segment: Segment) -> NDArray[np.uint64]:
        row: NDArray[np.uint64] = self.of[self._place[segment]]
        return row

    def total(self) -> NDArray[np.uint64]:
        total: NDArray[np.uint64] = self.of.sum(axis=0, dtype=np.uint64)
        return total


class Encoder:
    """Encodes block after block of `layout`, into arrays that the next block overwrites. For one thread at a time."""

    def __init__(self, layout: Layout):
        self._compiled = kernels_for(layout.nbytes)
        self._kernels = self._compiled or plain
        count = max((sum(s.count for s in each.segments if not s.plain) for each in layout.blocks), default=0)
        gaps, codes = int(count * GAPS_BELOW) + _SLACK, count + _SLACK
        masks = count // 64 + max((len(each.segments) for each in layout.blocks), default=0)
        self._gaps, self._far = np.empty(gaps, np.uint8), np.empty(gaps, np.uint32)
        self._short, self._big = np.empty(codes, np.uint8), np.empty(codes, np.uint32)
        self._masks, self._masked = np.empty(masks, np.uint64), 0
        self._fill = np.zeros(4, np.int64)  # used entries of gaps, far, short and big

    def encode(self, block: Block, old: np.ndarray, new: np.ndarray, lanes: Lanes | None = None) -> Coded:
        """`old`, `new`: uint8, whole buffers of two states. `lanes` of the old one become those of the new one."""
        n, body = len(block.segments), []
        codings, changes = np.zeros(n, np.uint8), np.zeros(n, np.uint32)
        old_words, new_words = old.view(np.uint64), new.view(np.uint64)
        self._fill[:] = self._masked = 0
        for i, segment in enumerate(block.segments):
            words = segment.words(old_words), segment.words(new_words)
            moved = np.zeros(2, np.uint64)
            if segment.plain:
                coding, count = (SKIP if np.array_equal(*words) else DENSE), 0
            else:
                first = -1 if lanes is None else segment.first_word
                coding, count = self._steps(segment, segment.bits(old), segment.bits(new), words, first, moved)
            codings[i], changes[i] = coding, count
            if coding == DENSE:
                body.append(segment.bits(new).view(np.uint8))
            if lanes is not None and coding == GAPS:
                lanes.row(segment)[:] += moved
            elif lanes is not None and coding != SKIP:
                lanes.sweep(segment, new_words)
        gaps, far, short, big = self._fill
        masks = self._masks[: self._masked]
        return Coded(
            codings, changes, self._gaps[:gaps], self._far[:far], masks, self._short[:short], self._big[:big], body
        )

    def _steps(
        self,
        segment: Segment,
        before: np.ndarray,
        after: np.ndarray,
        words: tuple[np.ndarray, np.ndarray],
        first: int,
        moved: np.ndarray,
    ) -> tuple[int, int]:
        """Coding and number of changes of a segment that is not plain; `moved`: the change of its lanes, of gaps."""
        guess, escapes = _sampled(before, after) if self._compiled else (0.0, 0.0)
        if guess <= 1.2 * GAPS_BELOW:
            limit = int(segment.count * GAPS_BELOW)
            count = self._kernels.encode_gaps(
                before, after, *words, first, limit, self._gaps, self._far, self._short, self._big, self._fill, moved
            )
            if count >= 0:
                return (GAPS if count else SKIP), count
        if _mask_bytes(segment, guess, escapes) < 1.1 * segment.width / 8:
            kept, mask = self._fill.copy(), self._masks[self._masked : self._masked + segment.mask_words]
            count = self._kernels.encode_mask(before, after, mask, self._short, self._big, self._fill)
            density, escapes = count / segment.count, int(self._fill[3] - kept[3]) / segment.count
            if count > 0 and _mask_bytes(segment, density, escapes) < segment.width / 8:
                self._masked += mask.size
                return MASK, count
            self._fill[:] = kept
            if count == 0:
                return SKIP, 0
        return DENSE, 0


def _mask_bytes(segment: Segment, density: float, escapes: float) -> float:
    """Bytes per element of a mask with steps, before compression."""
    return 1 / 8 + density / 2 + escapes * segment.width / 8


def chosen(segment: Segment, count: int, escapes: int, sample: tuple[float, float]) -> int:
    """The coding that an `Encoder` chooses where a segment that is not plain has this many changes and large steps, and
    `_sampled` gives `sample` (0, 0: it does not look)."""
    if sample[0] <= 1.2 * GAPS_BELOW and count <= int(segment.count * GAPS_BELOW):
        return GAPS if count else SKIP
    likely = _mask_bytes(segment, *sample) < 1.1 * segment.width / 8
    shorter = _mask_bytes(segment, count / segment.count, escapes / segment.count) < segment.width / 8
    return MASK if likely and shorter else DENSE


def stride(count: int) -> int:
    """Elements from the begin of a sampled stretch to that of the next."""
    return max(SAMPLE, count // SAMPLES)


def sample_size(count: int) -> int:
    return sum(min(SAMPLE, count - start) for start in range(0, count, stride(count)))


def _sampled(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """The shares of changes, and of steps too large for a short code, in a few stretches spread over the segment."""
    pieces = [slice(start, start + SAMPLE) for start in range(0, before.size, stride(before.size))]
    old, new = (np.concatenate([each[piece] for piece in pieces]) for each in (before, after))
    changed = old != new
    codes = plain.steps(old[changed], new[changed])
    return codes.size / max(1, old.size), int(np.count_nonzero(codes >= plain.ESCAPE_CODE)) / max(1, old.size)


def apply(parts: Sequence[Part], buffer: np.ndarray, lanes: Lanes | None = None) -> None:
    """Bring a state's buffer (uint8) from before to after a block that `planes.unpack` has accepted."""
    kernels, words = kernels_for(buffer.nbytes) or plain, buffer.view(np.uint64)
    for segment, coding, planes in parts:
        bits = segment.bits(buffer)
        if coding == GAPS:
            first = -1 if lanes is None else segment.first_word
            row = np.zeros(2, np.uint64) if lanes is None else lanes.row(segment)
            kernels.apply_gaps(bits, segment.words(words), first, *planes, row)
            continue
        if coding == MASK:
            kernels.apply_mask(bits, *planes)
        else:
            bits.view(np.uint8)[:] = planes[0]
        if lanes is not None:
            lanes.sweep(segment, words)
