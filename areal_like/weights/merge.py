"""Several deltas in a row → one that does the same: fewer bytes, because the same elements change again and again.

Needs no weights: steps add up (mod 2^width; what comes back to where it was is left out), later values and bits
replace earlier ones, and changes on top of bits are made there. NumPy only: it is done for who is behind, not for every
version.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise

import numpy as np

from areal_like.weights import plain
from areal_like.weights.codec import code_places, code_steps
from areal_like.weights.delta import Delta, Head, write
from areal_like.weights.layout import BITS_OF, Block, Layout, Segment
from areal_like.weights.planes import DENSE, GAPS, PLACES, SKIP, Coded, pack, parts_of

Change = tuple[str, np.ndarray, np.ndarray]
"""("steps", places, codes), ("values", places, values) or ("bits", bits, nothing) of one segment."""


def merge(deltas: Sequence[Delta], layout: Layout) -> bytes:
    """The message of the one delta. Raises ValueError if they do not follow one another."""
    for before, after in pairwise(deltas):
        if (before.head.version, before.head.digest) != (after.head.base, after.head.base_digest):
            raise ValueError(f"version {after.head.base} does not follow version {before.head.version}")
    first, last = deltas[0].head, deltas[-1].head
    blocks = [
        pack(_recoded(block, reduce(_joined, [_changes(block, delta.blocks[i]) for delta in deltas])))
        for i, block in enumerate(layout.blocks)
    ]
    return write(Head(first.base, last.version, first.base_digest, last.digest, last.mode), layout, blocks)


def _changes(block: Block, coded: Coded) -> dict[Segment, Change]:
    found: dict[Segment, Change] = {}
    rows = list(zip(block.segments, coded.codings.tolist(), coded.changes.tolist(), strict=True))
    for segment, coding, parts in parts_of(rows, coded):
        if coding == DENSE:
            found[segment] = ("bits", parts[0].view(BITS_OF[segment.width]), parts[0][:0])
        elif coding == PLACES:
            found[segment] = ("values", plain.decode_places(parts[0], parts[1]), parts[2])
        else:
            places = plain.decode_gaps(parts[0], parts[1]) if coding == GAPS else plain.decode_mask(parts[0])
            found[segment] = ("steps", places, plain.decode_codes(parts[-2], parts[-1]))
    return found


def _joined(earlier: dict[Segment, Change], later: dict[Segment, Change]) -> dict[Segment, Change]:
    both = {segment: _both(earlier[segment], later[segment], segment) for segment in earlier.keys() & later.keys()}
    return earlier | later | both


def _both(earlier: Change, later: Change, segment: Segment) -> Change:
    kind, places, what = later
    if kind == "bits":
        return later
    if earlier[0] == "bits":
        bits = earlier[1].copy()
        bits[places] = what if kind == "values" else plain.stepped(bits[places], what)
        return ("bits", bits, bits[:0])
    union, where = np.unique(np.concatenate([earlier[1], places]), return_inverse=True)
    if kind == "values":
        values = np.empty(union.size, what.dtype)
        values[where[: earlier[1].size]] = earlier[2]
        values[where[earlier[1].size :]] = what
        return ("values", union, values)
    codes, changed = plain.added(np.concatenate([earlier[2], what]), where, union.size, segment.width)
    return ("steps", union[changed], codes)


def _recoded(block: Block, changes: dict[Segment, Change]) -> Coded:
    n = len(block.segments)
    coded, body, steps = Coded(np.zeros(n, np.uint8), np.zeros(n, np.uint32)), list[np.ndarray](), []
    for i, segment in enumerate(block.segments):
        kind, where, what = changes.get(segment, ("", np.zeros(0), np.zeros(0)))
        coding, count = SKIP, 0
        if kind == "bits":
            coding = DENSE
            body.append(where.view(np.uint8))
        elif kind == "values":
            coding, count, parts = code_places(segment, where, what)
            body += parts
        elif kind == "steps":
            coding, count, planes = code_steps(segment, where, what)
            steps.append(planes)
        coded.codings[i], coded.changes[i] = coding, count
    if steps:
        coded.gaps, coded.far, coded.masks, coded.short, coded.big = map(np.concatenate, zip(*steps, strict=True))
    coded.body = body
    return coded
