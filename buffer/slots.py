"""The places in the order of training: who gives them out, and how they are given anew when the order is changed.

A slot below the *horizon* of a version may hold tokens of that version (`buffer.admission`). So the horizon of a
group's oldest token is a deadline for its slot, and whether a set of groups can all be trained within the bound is
the question whether each can get a slot of its own below its deadline: earliest deadline first answers it.
Pure but for `Slots`, which is plain bookkeeping.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(slots=True)
class Slots:
    """`end`: all slots below it were given out once; `free`: a heap of those that a group has left untrained; `changes`
    counts what is given out and back."""

    end: int = 0
    free: list[int] = field(default_factory=list)
    changes: int = field(default=0, compare=False)

    @property
    def next(self) -> int:
        """The slot that `take` gives."""
        return self.free[0] if self.free else self.end

    @property
    def used(self) -> int:
        """Slots in use or trained."""
        return self.end - len(self.free)

    def take(self) -> int:
        self.changes += 1
        if self.free:
            return heapq.heappop(self.free)
        self.end += 1
        return self.end - 1

    def give_back(self, slot: int) -> None:
        self.changes += 1
        heapq.heappush(self.free, slot)

    def reset(self, end: int) -> None:
        """All below `end` are in use or trained."""
        self.end, self.free = end, []

    def begin(self, version: int) -> None:
        """The run begins, or goes on after a crash, with weights of `version`."""

    def advance(self, version: int) -> None:
        """Slots that need `version` are open, and no others: see `buffer.injection`."""

    def open_to(self, version: int, horizon: float) -> float:
        """How many an actor that holds `version` could fill: those below the `horizon` of that version."""
        return self.below(horizon)

    def fits(self, slot: int, version: int) -> bool:
        """May a group in `slot` start on `version`, as far as it is not a matter of the bound?"""
        return True

    def unfilled(self, below: int) -> set[int]:
        """Slots that nobody holds and that a batch, whose slots are `below`, must wait for."""
        return set(self.free)

    def check(self, entry: Any, version: int) -> None:
        """Raises if a group that is about to be served at `version` must not stand in its slot."""

    def check_memory(self, limit: int) -> None:
        """Raises if these slots can't be waited for until less than `limit` bytes are held."""

    def state(self) -> list[Any]:
        """For `load`."""
        return [self.end, list(self.free)]

    def load(self, state: list[Any]) -> None:
        self.end, self.free = state[0], list(state[1])

    def below(self, horizon: float) -> float:
        """How many could be taken that are below `horizon` (may be inf)."""
        fresh = max(0, horizon - self.end)
        return fresh + sum(slot < horizon for slot in self.free) if self.free else fresh


@dataclass(frozen=True, slots=True)
class Holder:
    """A group and its deadline (inf: none). `here`: it can be served now; else it is `running`, or queued. `wish`: a
    deadline that it would lose some samples by, and no more: it is kept where that costs no other group its own."""

    id: int
    slot: int
    deadline: float
    here: bool = False
    running: bool = False
    wish: float = math.inf


def _by_deadline(holders: Iterable[Holder]) -> list[Holder]:
    return sorted(holders, key=lambda holder: (holder.deadline, holder.slot))


def place(holders: Iterable[Holder], first: int) -> dict[int, int]:
    """id → slot, from `first` on without gaps. Those that don't fit below their deadline come last. Wishes are granted
    together or, if a group would miss its deadline for them, not at all."""
    holders = list(holders)
    wishing = {holder.id for holder in holders if holder.wish < holder.deadline}
    if wishing:
        fitting, late = _fit([replace(holder, deadline=min(holder.wish, holder.deadline)) for holder in holders], first)
        if {holder.id for holder in late} <= wishing:
            return {holder.id: slot for slot, holder in enumerate(fitting + late, first)}
    fitting, late = _fit(holders, first)
    return {holder.id: slot for slot, holder in enumerate(fitting + late, first)}


def _fit(holders: Iterable[Holder], first: int) -> tuple[list[Holder], list[Holder]]:
    """Those that get a slot below their deadline, in order, and the others."""
    fitting: list[Holder] = []
    late: list[Holder] = []
    for holder in _by_deadline(holders):
        (fitting if first + len(fitting) < holder.deadline else late).append(holder)
    return fitting, late


def rescue(picked: Sequence[int], holders: Sequence[Holder], first: int) -> tuple[int, ...]:
    """A batch like `picked` whose leaving behind all others breaks no bound: they fit into the slots from `first` on.

    Groups that would not fit take the places of those with the latest deadlines. () if that needs a group that still
    runs: the batch must be held until it is here. What can't be mended at all (weights older than a lease promised)
    is left as it is.
    """
    known = {holder.id: holder for holder in holders}
    chosen = list(picked)
    while endangered := _too_many(chosen, holders, first):
        substitute = next((holder for holder in endangered if holder.here), None)
        latest = max(chosen, key=lambda each: (known[each].deadline, known[each].slot))
        if known[latest].deadline <= endangered[-1].deadline:
            break
        if substitute is None:
            if any(holder.running for holder in endangered):
                return ()
            break
        chosen[chosen.index(latest)] = substitute.id
    return tuple(chosen)


def _too_many(chosen: Sequence[int], holders: Iterable[Holder], first: int) -> list[Holder]:
    """The shortest run of earliest deadlines, `chosen` left out, that has more groups than slots."""
    taken = set(chosen)
    rest = _by_deadline(holder for holder in holders if holder.id not in taken)
    for place_of, holder in enumerate(rest, first):
        if place_of >= holder.deadline:
            return rest[: place_of - first + 1]
    return []
