"""Which groups are in which stage, and which of those has the lowest slot: kept up to date, so that nobody need search.

Whoever changes the stage or the slot of a group does it here. `Stages.changes` counts that, so a decision that rests on
nothing else need not be made again while the count stays.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from buffer.entries import NO_SLOT, Entry, Stage

SLACK = 64
"""Outdated items that a heap may hold beyond as many as there are groups; then it is made anew."""

Key = tuple[bool, int, int]
"""Without a slot, slot, place in the order of arrival."""


class BySlot:
    """Ids of groups, the lowest slot first; those without a slot come last, the longest there first. O(log n) each."""

    def __init__(self) -> None:
        self._keys: dict[int, Key] = {}
        self._heap: list[tuple[Key, int]] = []
        self._arrivals = 0

    def add(self, group_id: int, slot: int) -> None:
        self._arrivals += 1
        self._put(group_id, (slot == NO_SLOT, slot, self._arrivals))

    def change(self, group_id: int, slot: int) -> None:
        """Its slot is another now; its place in the order of arrival stays. Of groups that are not here, nothing."""
        if group_id in self._keys:
            self._put(group_id, (slot == NO_SLOT, slot, self._keys[group_id][2]))

    def discard(self, group_id: int) -> None:
        self._keys.pop(group_id, None)

    def first(self) -> int | None:
        """The lowest; None without any."""
        while self._heap:
            key, group_id = self._heap[0]
            if self._keys.get(group_id) == key:
                return group_id
            heapq.heappop(self._heap)
        return None

    def _put(self, group_id: int, key: Key) -> None:
        self._keys[group_id] = key
        heapq.heappush(self._heap, (key, group_id))
        if len(self._heap) > 2 * len(self._keys) + SLACK:
            self._heap = [(key, group_id) for group_id, key in self._keys.items()]
            heapq.heapify(self._heap)


class Stages:
    """The active groups by stage, each in the order in which they came there."""

    def __init__(self) -> None:
        self.changes = 0
        self._entries: dict[Stage, dict[int, Entry]] = {stage: {} for stage in Stage}
        self._by_slot = {stage: BySlot() for stage in (Stage.RUNNING, Stage.QUEUED, Stage.WAITING)}

    def __getitem__(self, stage: Stage) -> dict[int, Entry]:
        return self._entries[stage]

    def enter(self, entry: Entry) -> None:
        """A group that was nowhere is in its stage."""
        self.changes += 1
        self._entries[entry.stage][entry.id] = entry
        if order := self._by_slot.get(entry.stage):
            order.add(entry.id, entry.slot)

    def leave(self, entry: Entry) -> None:
        self.changes += 1
        del self._entries[entry.stage][entry.id]
        if order := self._by_slot.get(entry.stage):
            order.discard(entry.id)

    def set_slot(self, entry: Entry, slot: int) -> None:
        """It gets another place in the order of training."""
        self.changes += 1
        entry.slot = slot
        if order := self._by_slot.get(entry.stage):
            order.change(entry.id, slot)

    def first(self, stage: Stage) -> Entry | None:
        """The group of the lowest slot in a stage (RUNNING, QUEUED, WAITING); those without a slot come last."""
        found = self._by_slot[stage].first()
        return self._entries[stage][found] if found is not None else None

    def lowest(self, stages: Iterable[Stage]) -> Entry | None:
        """The group of the lowest slot in any of these stages; None if no group there has a slot."""
        found = [first for stage in stages if (first := self.first(stage)) and first.slot != NO_SLOT]
        return min(found, key=lambda entry: entry.slot, default=None)
