"""The active groups: each with its stage, slot, lease and payload; and their index by stage, holder and slot."""

import heapq
from collections.abc import Sequence
from enum import StrEnum
from itertools import chain

import msgspec

from areal_like.wire.groups import Head
from areal_like.wire.stored import Payload

NO_SLOT = -1
SLACK = 64
"""A heap is rebuilt when its outdated items exceed the number of groups by more than this."""


class Stage(StrEnum):
    __hash__ = str.__hash__  # an enum's own hash is several times as slow

    DEFERRED = "deferred"
    QUEUED = "queued"
    RUNNING = "running"
    REDUNDANT = "redundant"
    RECALLED = "recalled"
    WAITING = "waiting"
    SERVED = "served"


LEASED = (Stage.RUNNING, Stage.REDUNDANT, Stage.RECALLED)
UNFINISHED = dict.fromkeys((*LEASED, Stage.QUEUED))  # a set in order


class Entry(msgspec.Struct):
    """One active group. Times are in seconds of the monotonic clock."""

    id: int
    row: int
    slot: int
    launch: int
    need: int
    stage: Stage
    actor: str = ""  # holder of its lease
    lease_version: int = 0  # no token is older: version of the actor's weights
    admitted_at: float = 0.0
    pushed_at: float = 0.0
    pushed: int = -1  # its place in the order of finishing
    version_at_push: int = 0
    head: Head | None = None  # of the push, like the payload
    payload: Payload = b""
    pushed_by: str = ""  # the actor that pushed it
    batch: int = -1  # if SERVED
    was_deferred: bool = False
    task: str = ""  # of a mixture
    cut: tuple[int, ...] = ()  # tokens of samples that it did not wait for

    # Notes on its leases, not kept over a restart.
    moved_at: float = 0.0  # when it was leased or last made progress
    tokens: int = 0  # of this lease, as its actor reports them
    grew_at: float = 0.0  # when they last increased
    holders: tuple[str, ...] = ()  # all actors that had a lease of it, the present one included
    refused: int = 0  # refused pushes
    timeouts: int = 0  # leases revoked because they made no progress
    deaths: int = 0  # of actors that held it and died by themselves
    failed: bool = False  # on an actor that could not roll it out
    failed_on: str = ""  # the last actor that failed, whose push was refused, or whose lease was revoked

    @property
    def oldest(self) -> int:
        """Version of its oldest token."""
        assert self.head is not None
        return self.head.oldest

    @property
    def newest(self) -> int:
        """Version of its newest token."""
        assert self.head is not None
        return self.head.newest

    def oldest_trained(self, allowed: int) -> int | None:
        """Version of its oldest token of version `allowed` or newer; None if there is none."""
        assert self.head is not None
        if (oldest := self.head.oldest) >= allowed:
            return oldest
        return min((version for version in self.head.versions if version >= allowed), default=None)


class BySlot:
    """Groups ordered by slot, lowest first. Each operation takes O(log n)."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._slots

    def put(self, group_id: int, slot: int) -> None:
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
    """Only `add`, `move`, `reslot` and `remove` change it, and its groups' stage and slot. `redundant`: with a lease
    and no slot."""

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        super().clear()
        self.redundant: dict[int, Entry] = {}
        self._in: dict[Stage, dict[int, Entry]] = {stage: {} for stage in Stage}
        self._held: dict[str, dict[int, Entry]] = {}
        self._unfinished, self._queued = BySlot(), BySlot()

    def of(self, *stages: Stage) -> list[Entry]:
        """The groups in these stages; within each stage in order of arrival."""
        return list(chain.from_iterable(self._in[stage].values() for stage in stages))

    def count(self, *stages: Stage) -> int:
        found = 0
        for stage in stages:
            found += len(self._in[stage])
        return found

    def held_by(self, actor: str) -> dict[int, Entry]:
        """The groups that this actor has a lease of, by id."""
        return self._held.get(actor, {})

    def levels(self) -> dict[str, object]:
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
        return self.get(self._queued.first()) if self._in[Stage.QUEUED] else None

    @property
    def first_unfinished(self) -> Entry | None:
        """The unfinished group with the lowest slot."""
        return self.get(self._unfinished.first())

    def lowest_open(self, free: Sequence[int]) -> tuple[int, int | None] | None:
        """(slot, holder) of the lowest taken slot without a group to serve; holder None: it is `free` (a heap)."""
        held = self.first_unfinished
        if held is None:
            return (free[0], None) if free else None
        return (free[0], None) if free and free[0] < held.slot else (held.slot, held.id)

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
