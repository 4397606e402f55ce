"""Where weights differ from those of an earlier version: all that an engine has to write in order to follow.

Collected by the replica while deltas are applied, beside generation; what is written in the pause is then as much as
has changed, and not the model. A place may be named twice: what is written there is the newest value in any case.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from areal_like.weights import plain
from areal_like.weights.delta import Delta
from areal_like.weights.layout import Layout
from areal_like.weights.planes import DENSE, GAPS, PLACES, parts_of

SINGLY_BELOW = 1 / 32
"""Share of changed elements up to which they are written one by one: that takes 10 ns each, in a row .25 ns."""

Where = slice | np.ndarray
"""Elements of a tensor, flat: a stretch, or places int64."""


@dataclass(slots=True)
class Changes:
    """Since the weights with the digest `since`: for each tensor that has changed (by its place in the table) where."""

    since: str
    tensors: dict[int, list[Where]] = field(default_factory=lambda: defaultdict(list))

    def add(self, delta: Delta, layout: Layout) -> None:
        """What a delta that was read changes, too."""
        for block, coded in zip(layout.blocks, delta.blocks, strict=True):
            rows = list(zip(block.segments, coded.codings.tolist(), coded.changes.tolist(), strict=True))
            for segment, coding, parts in parts_of(rows, coded):
                pieces = layout.pieces(segment)
                single = coding in (GAPS, PLACES) and parts[-2].size <= segment.count * SINGLY_BELOW
                if coding == DENSE or not single:
                    for tensor, start, stop in pieces:
                        self.tensors[tensor].append(slice(start, stop))
                    continue
                (tensor, start, _), *_ = pieces
                places = plain.decode_gaps(*parts[:2]) if coding == GAPS else plain.decode_places(*parts[:2])
                self.tensors[tensor].append(places + start)
