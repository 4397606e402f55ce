"""The staleness bound, as arithmetic. No I/O, no clock.

Every admitted group holds a *slot*: its place in the order of training. Batch k trains the slots from
`Batches.first(k)` up to `first(k + 1)`, [k·B, (k+1)·B) where all have B groups, at train version k // interval
(interval = train steps per published version).
A group may start on weights of version `v` only in a slot whose train version is at most v + max_staleness. Then no
token can be older than the bound when its slot is trained, however long the group runs or waits: the bound holds by
construction, and not only if groups finish in order (AReaL, arXiv 2505.24298, eq. 3, counts groups instead; a slot
that a rejected or dropped group leaves is given to the next one, so its capacity cannot drift either).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any


class Batches:
    """Which slots each batch has. How many groups make a batch is settled when it is *opened*, before the first of
    them is admitted, and never changes; batches that are not open yet are taken to have `usual` groups, so no slot
    that was given out depends on that guess."""

    def __init__(self, usual: int):
        self.usual = usual
        self._batch = 0
        self._firsts = [0]  # the first slots of batch `_batch` and the opened ones after it; last: of the next to open

    @property
    def opened(self) -> int:
        """Batches below it are open."""
        return self._batch + len(self._firsts) - 1

    @property
    def end(self) -> int:
        """Slots below it are those of batches that are open."""
        return self._firsts[-1]

    def open(self, groups: int) -> None:
        """The next one gets so many groups, and so will those after it as long as nothing else is said."""
        self._firsts.append(self._firsts[-1] + groups)
        self.usual = groups

    def first(self, batch: int) -> int:
        """The first slot of a batch; exact from the oldest one that is not forgotten on."""
        place = batch - self._batch
        if 0 <= place < len(self._firsts):
            return self._firsts[place]
        near = self._batch if place < 0 else self.opened
        return self._firsts[near - self._batch] + (batch - near) * self.usual

    def size(self, batch: int) -> int:
        """Groups of a batch."""
        return self.first(batch + 1) - self.first(batch)

    def of(self, slot: int) -> int:
        """The batch that has a slot."""
        if slot >= self._firsts[-1]:
            return self.opened + (slot - self._firsts[-1]) // self.usual
        if slot < self._firsts[0]:
            return self._batch + (slot - self._firsts[0]) // self.usual
        return self._batch + bisect_right(self._firsts, slot) - 1

    def forget(self, before: int) -> None:
        """Batches before that one are trained for good: nobody asks for their slots again."""
        gone = min(before, self.opened) - self._batch
        if gone > 0:
            self._batch, self._firsts = self._batch + gone, self._firsts[gone:]

    def state(self) -> list[Any]:
        """For `load`."""
        return [self.usual, self._batch, list(self._firsts)]

    def load(self, state: list[Any]) -> None:
        self.usual, self._batch, self._firsts = state[0], state[1], list(state[2])


@dataclass(frozen=True, slots=True)
class Bound:
    """`max_staleness` in versions (math.inf: none), `groups_per_batch` of batches of which nothing else is said (see
    `batches`), `interval` = weight_sync_interval."""

    max_staleness: float
    groups_per_batch: int
    interval: int = 1
    batches: Batches = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "batches", Batches(self.groups_per_batch))

    def batch_version(self, batch: int) -> int:
        """The train version of a batch: updates published before it is trained."""
        return batch // self.interval

    def slot_version(self, slot: int) -> int:
        """The train version at which a slot is trained."""
        return self.batch_version(self.batches.of(slot))

    def horizon(self, version: float) -> float:
        """Slots below this may start on weights of `version`: the deadline of a group that has tokens of it."""
        if math.isinf(self.max_staleness) or math.isinf(version):
            return math.inf
        return self.batches.first((int(version) + 1 + int(self.max_staleness)) * self.interval)

    def oldest(self, slot: int) -> float:
        """Version of the oldest token that may be trained in `slot` (may be -inf, or below 0)."""
        return self.slot_version(slot) - self.max_staleness

    def admits(self, slot: int, version: int) -> bool:
        """May the group in `slot` contain a token of `version`?"""
        return version >= self.oldest(slot)
