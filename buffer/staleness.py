"""The staleness bound, as arithmetic: which slot may hold which tokens. No I/O, no clock.

Every admitted group holds a *slot*: its place in the order of training. Batch k trains the slots from
`Batches.first(k)` up to `first(k + 1)`: [k·B, (k+1)·B) if all batches have B groups. Its train version is k // interval
(interval = train steps per published version).

A group may start on weights of version `v` only in a slot whose train version is at most v + max_staleness. Then no
token is older than the bound when its slot is trained, however long the group runs or waits. The bound holds by
construction, in any order of finishing. (AReaL, arXiv 2505.24298, eq. 3, counts groups.) The next group takes the slot
of a rejected or dropped one, so capacity cannot drift.

The *deadline* of a group with tokens of some version is the first slot that may not hold them (`Bound.deadline`).
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field


class Batches:
    """Which slots each batch has. The number of groups of a batch is fixed when the batch is *opened*, before its first
    group is admitted. Batches that are not open yet count as `usual` groups; no slot in use depends on that guess."""

    def __init__(self, usual: int):
        self.usual = usual
        self._batch = 0
        self._firsts = [0]  # first slots of batch `_batch` and of the opened ones after it; last: of the next to open

    @property
    def opened(self) -> int:
        """Batches below this are open."""
        return self._batch + len(self._firsts) - 1

    @property
    def end(self) -> int:
        """Slots below this belong to open batches."""
        return self._firsts[-1]

    def open(self, groups: int) -> None:
        """Open the next batch, of `groups` groups. Later batches count as this size until they are opened."""
        self._firsts.append(self._firsts[-1] + groups)
        self.usual = groups

    def first(self, batch: int) -> int:
        """The first slot of a batch; exact for batches that are not forgotten."""
        place = batch - self._batch
        if 0 <= place < len(self._firsts):
            return self._firsts[place]
        near = self._batch if place < 0 else self.opened
        return self._firsts[near - self._batch] + (batch - near) * self.usual

    def size(self, batch: int) -> int:
        return self.first(batch + 1) - self.first(batch)

    def size_at(self, slot: int) -> int:
        place = bisect_right(self._firsts, slot)
        return self._firsts[place] - self._firsts[place - 1] if 0 < place < len(self._firsts) else self.usual

    def of(self, slot: int) -> int:
        if slot >= self._firsts[-1]:
            return self.opened + (slot - self._firsts[-1]) // self.usual
        if slot < self._firsts[0]:
            return self._batch + (slot - self._firsts[0]) // self.usual
        return self._batch + bisect_right(self._firsts, slot) - 1

    def forget(self, before: int) -> None:
        """Forget batches before `before`: they are trained for good, so their slots are not needed again."""
        gone = min(before, self.opened) - self._batch
        if gone > 0:
            self._batch, self._firsts = self._batch + gone, self._firsts[gone:]

    def state(self) -> tuple[int, int, list[int]]:
        """(usual, first batch, first slots), for `load`."""
        return self.usual, self._batch, list(self._firsts)

    def load(self, state: tuple[int, int, list[int]]) -> None:
        self.usual, self._batch, firsts = state
        self._firsts = list(firsts)


@dataclass(frozen=True, slots=True)
class Bound:
    """`max_staleness`: in versions (math.inf: none). `groups_per_batch`: of batches not open yet. `interval`:
    weight_sync_interval."""

    max_staleness: float
    groups_per_batch: int
    interval: int = 1
    batches: Batches = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "batches", Batches(self.groups_per_batch))

    def batch_version(self, batch: int) -> int:
        """The train version of a batch: number of updates published before it is trained."""
        return batch // self.interval

    def slot_version(self, slot: int) -> int:
        """The train version at which a slot is trained."""
        return self.batch_version(self.batches.of(slot))

    def deadline(self, version: float) -> float:
        """Groups in slots below this may start on weights of `version`: the deadline of a group with such tokens."""
        last = version + self.max_staleness
        return last if math.isinf(last) else self.batches.first((int(last) + 1) * self.interval)

    def oldest(self, slot: int) -> float:
        """Version of the oldest token that may be trained in `slot` (may be -inf, or below 0)."""
        return self.slot_version(slot) - self.max_staleness

    def admits(self, slot: int, version: int) -> bool:
        """May the group in `slot` contain a token of `version`?"""
        return version >= self.oldest(slot)


@dataclass(slots=True)
class Slots:
    """`end`: all slots below it were taken once. `free`: heap of slots that a group left untrained."""

    end: int = 0
    free: list[int] = field(default_factory=list)

    @property
    def next(self) -> int:
        """The slot that the next `take` returns."""
        return self.free[0] if self.free else self.end

    @property
    def used(self) -> int:
        """Slots in use or trained."""
        return self.end - len(self.free)

    def reset(self, end: int, free: Iterable[int] = ()) -> None:
        self.end, self.free = end, list(free)

    def take(self) -> int:
        if self.free:
            return heapq.heappop(self.free)
        self.end += 1
        return self.end - 1

    def release(self, slot: int) -> None:
        heapq.heappush(self.free, slot)

    def open_to(self, deadline: float) -> float:
        """How many slots below `deadline` a group may take."""
        fresh = max(0, deadline - self.end)
        return fresh + sum(slot < deadline for slot in self.free) if self.free else fresh
