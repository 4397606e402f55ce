"""Merges consecutive deltas into one with the same effect: fewer bytes, because the same elements change again and
again.

Needs no weights: steps add up (mod 2^width; elements that return to their old value are left out), later bits replace
earlier ones, and steps on top of bits are applied to them. Block by block and delta by delta, into arrays as long as a
segment, so that time grows with the changes and memory does not. NumPy only: merging serves late actors, not every
version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from areal_like.weights import plain
from areal_like.weights.codec import code_steps
from areal_like.weights.delta import DeltaHead, Message, opened, write
from areal_like.weights.layout import BITS_OF, Block, Layout, Segment
from areal_like.weights.planes import DENSE, GAPS, SKIP, Coded, pack, parts_of, unpack


def merge(messages: Sequence[Message], layout: Layout) -> bytes:
    """The message of the one delta. Raises ValueError if they do not follow one another, DeltaError."""
    deltas = [opened(message, layout) for message in messages]
    heads = [head for head, _ in deltas]
    for before, after in pairwise(heads):
        if (before.version, before.digest) != (after.base, after.base_digest):
            raise ValueError(f"version {after.base} does not follow version {before.version}")
    first, last, blocks = heads[0], heads[-1], []
    for i, block in enumerate(layout.blocks):
        totals: dict[Segment, _Total] = {}
        for _, packed in deltas:
            coded = unpack(packed[i], block)
            rows = list(zip(block.segments, coded.codings.tolist(), coded.changes.tolist(), strict=True))
            for segment, coding, parts in parts_of(rows, coded):
                totals.setdefault(segment, _Total(segment)).add(coding, parts)
        blocks.append(pack(_recoded(block, totals)))
    return write(DeltaHead(first.base, last.version, first.base_digest, last.digest), layout, blocks)


class _Total:
    """Sum of the changes of a segment: `bits` of all of it; or, where `touched` (bool [count]) is true, `steps`
    (int32 [count], which wrap as they should)."""

    def __init__(self, segment: Segment):
        self._segment = segment
        self.bits: np.ndarray | None = None
        self._touched, self._steps = np.zeros(0, bool), np.zeros(0, np.int32)

    def add(self, coding: int, parts: tuple[np.ndarray, ...]) -> None:
        """Add one segment's changes; `parts` come from `planes.parts_of`."""
        if coding == DENSE:
            self.bits = parts[0].view(BITS_OF[self._segment.width]).copy()
            return
        places = plain.decode_gaps(*parts[:2]) if coding == GAPS else plain.decode_mask(parts[0])
        codes = plain.decode_codes(*parts[-2:])
        if self.bits is not None:
            self.bits[places] = plain.stepped(self.bits[places], codes)
            return
        if not self._touched.size:
            self._touched = np.zeros(self._segment.count, bool)
            self._steps = np.zeros(self._segment.count, np.int32)
        self._touched[places] = True
        self._steps[places] += plain.distances(codes).astype(np.int32)

    def changes(self) -> tuple[np.ndarray, np.ndarray]:
        """Places, and the steps there."""
        places = np.flatnonzero(self._touched)
        return places, self._steps[places]


def _recoded(block: Block, totals: Mapping[Segment, _Total]) -> Coded:
    n = len(block.segments)
    coded, body, steps = Coded(np.zeros(n, np.uint8), np.zeros(n, np.uint32)), list[np.ndarray](), []
    for i, segment in enumerate(block.segments):
        coding, count, total = SKIP, 0, totals.get(segment)
        if total is None:
            continue
        if total.bits is not None:
            coding = DENSE
            body.append(total.bits.view(np.uint8))
        else:
            places, moved = total.changes()
            codes, changed = plain.codes_of(moved, segment.width)
            coding, count, planes = code_steps(segment, places[changed], codes)
            steps.append(planes)
        coded.codings[i], coded.changes[i] = coding, count
    if steps:
        coded.gaps, coded.far, coded.masks, coded.short, coded.big = map(np.concatenate, zip(*steps, strict=True))
    coded.body = body
    return coded
