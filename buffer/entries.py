"""The active groups by id, and by stage, holder and slot."""

from __future__ import annotations

import heapq
from itertools import chain

from buffer.entry import LEASED, NO_SLOT, UNFINISHED, Entry, Stage

SLACK = 64
"""A heap is rebuilt when its outdated items exceed the number of groups by more than this."""


class BySlot:
    """Groups ordered by slot, lowest first. Each operation takes O(log n)."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._slots

    def put(self, group_id: int, slot: int) -> None:
        """Add a group, or change its slot."""
        self._slots[group_id] = slot
        heapq.heappush(self._heap, (slot, group_id))
        if len(self._heap) > 2 * len(self._slots) + SLACK:
            self._heap = [(slot, group_id) for group_id, slot in self._slots.items()]
            heapq.heapify(self._heap)

    def discard(self, group_id: int) -> None:
        self._slots.pop(group_id, None)

    def first(self) -> int:
        """The id of the group with the lowest slot; -1 if empty."""
        while self._heap:
            slot, group_id = self._heap[0]
            if self._slots.get(group_id) == slot:
                return group_id
            heapq.heappop(self._heap)
        return -1


class Entries(dict[int, Entry]):
    """Only `add`, `move`, `reslot` and `remove` change it, and the stage and slot of its groups. `redundant`: groups
    with a lease and no slot."""

    def __init__(self) -> None:
        super().__init__()
        self.redundant: dict[int, Entry] = {}
        self._in: dict[Stage, dict[int, Entry]] = {stage: {} for stage in Stage}
        self._held: dict[str, dict[int, Entry]] = {}
        self._unfinished, self._queued = BySlot(), BySlot()

    def of(self, *stages: Stage) -> list[Entry]:
        """The groups in these stages; within each stage in order of arrival."""
        return list(chain.from_iterable(self._in[stage].values() for stage in stages))

    def count(self, *stages: Stage) -> int:
        return sum(map(len, map(self._in.__getitem__, stages)))

    def held_by(self, actor: str) -> dict[int, Entry]:
        """The groups that this actor has a lease of, by id."""
        return self._held.get(actor, {})

    def levels(self) -> dict[str, object]:
        """Counts of groups by stage, for metrics."""
        stages = (Stage.DEFERRED, Stage.QUEUED, Stage.WAITING, Stage.SERVED)
        found: dict[str, object] = {f"buffer/{stage}": self.count(stage) for stage in stages}
        return found | {"buffer/running": self.count(*LEASED)}

    @property
    def in_queue(self) -> int:
        """Groups in the queue, and recalled groups, which join it when their actors hand them back."""
        return self.count(Stage.DEFERRED) + sum(entry.stage is Stage.RECALLED for entry in self.redundant.values())

    @property
    def first_deferred(self) -> Entry | None:
        """The group that has been DEFERRED for the longest time."""
        return next(iter(self._in[Stage.DEFERRED].values()), None)

    @property
    def first_queued(self) -> Entry | None:
        """The QUEUED group with the lowest slot."""
        return self.get(self._queued.first())

    @property
    def first_unfinished(self) -> Entry | None:
        """The unfinished group with the lowest slot."""
        return self.get(self._unfinished.first())

    def add(self, entry: Entry) -> None:
        self[entry.id] = entry
        self._enter(entry)

    def remove(self, entry: Entry) -> None:
        del self[entry.id]
        self._leave(entry)

    def move(self, entry: Entry, stage: Stage, slot: int | None = None) -> None:
        """Move to another stage and, if `slot` is given, to another slot. A group without a lease has no actor."""
        self._leave(entry)
        entry.stage = stage
        if slot is not None:
            entry.slot = slot
        if stage in (Stage.QUEUED, Stage.DEFERRED):
            entry.actor = ""
        self._enter(entry)

    def reslot(self, entry: Entry, slot: int) -> None:
        """Give a group another slot; its place in the order of arrival stays."""
        entry.slot = slot
        for order in (self._unfinished, self._queued):
            if entry.id in order:
                order.put(entry.id, slot)

    def _enter(self, entry: Entry) -> None:
        stage = entry.stage
        self._in[stage][entry.id] = entry
        if stage in UNFINISHED:
            if entry.slot == NO_SLOT:
                self.redundant[entry.id] = entry
            else:
                self._unfinished.put(entry.id, entry.slot)
            if stage is Stage.QUEUED:
                self._queued.put(entry.id, entry.slot)
            else:
                self._held.setdefault(entry.actor, {})[entry.id] = entry

    def _leave(self, entry: Entry) -> None:
        stage = entry.stage
        del self._in[stage][entry.id]
        if stage in UNFINISHED:
            self.redundant.pop(entry.id, None)
            self._unfinished.discard(entry.id)
            if stage is Stage.QUEUED:
                self._queued.discard(entry.id)
            else:
                held = self._held[entry.actor]
                del held[entry.id]
                if not held:
                    del self._held[entry.actor]
