"""The active groups: each with its stage, slot, lease and payload; and their index by stage, holder and slot."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Sequence
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


DEFERRED, QUEUED, RUNNING, REDUNDANT, RECALLED, WAITING, SERVED = Stage  # `Stage.QUEUED` takes 0.1 µs with Python 3.11
LEASED = (RUNNING, REDUNDANT, RECALLED)
UNFINISHED = dict.fromkeys((*LEASED, QUEUED))  # a set in order


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
    """The groups of some stages that have a slot, lowest slot first. Each operation takes O(log n)."""

    def __init__(self, entries: Entries, stages: Collection[Stage]) -> None:
        self._entries, self._stages = entries, stages
        self._heap: list[tuple[int, int]] = []  # (slot, id), also of groups that have left or have another slot

    def put(self, entry: Entry) -> None:
        heapq.heappush(self._heap, (entry.slot, entry.id))
        if len(self._heap) > 2 * len(self._entries) + SLACK:
            self._heap = [(each.slot, each.id) for each in self._entries.of(*self._stages) if each.slot != NO_SLOT]
            heapq.heapify(self._heap)

    def first(self) -> Entry | None:
        """The group with the lowest slot."""
        while self._heap:
            slot, group_id = self._heap[0]
            entry = self._entries.get(group_id)
            if entry and entry.slot == slot and entry.stage in self._stages:
                return entry
            heapq.heappop(self._heap)
        return None


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
        self._held: defaultdict[str, dict[int, Entry]] = defaultdict(dict)
        self._unfinished, self._queued = BySlot(self, UNFINISHED), BySlot(self, (QUEUED,))

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
        return self._held[actor]

    def levels(self) -> dict[str, object]:
        stages = (DEFERRED, QUEUED, WAITING, SERVED)
        found: dict[str, object] = {f"buffer/{stage}": self.count(stage) for stage in stages}
        return found | {"buffer/running": self.count(*LEASED)}

    @property
    def in_queue(self) -> int:
        """Groups in the queue, and recalled groups, which join it when their actors hand them back."""
        return self.count(DEFERRED) + sum(entry.stage is RECALLED for entry in self.redundant.values())

    @property
    def first_deferred(self) -> Entry | None:
        """The group that has been DEFERRED for the longest time."""
        return next(iter(self._in[DEFERRED].values()), None)

    @property
    def first_queued(self) -> Entry | None:
        """The QUEUED group with the lowest slot."""
        return self._queued.first() if self._in[QUEUED] else None

    def lowest_open(self, free: Sequence[int]) -> tuple[int, int | None] | None:
        """(slot, holder) of the lowest taken slot without a group to serve; holder None: it is `free` (a heap)."""
        held = self._unfinished.first()
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
        if stage is QUEUED or stage is DEFERRED:
            entry.actor = ""
        self._enter(entry)

    def reslot(self, entry: Entry, slot: int) -> None:
        """Give a group another slot; its place in the order of arrival stays."""
        entry.slot = slot
        if entry.stage in UNFINISHED:
            self._unfinished.put(entry)
        if entry.stage is QUEUED:
            self._queued.put(entry)

    def _enter(self, entry: Entry) -> None:
        stage = entry.stage
        self._in[stage][entry.id] = entry
        if stage in UNFINISHED:
            if entry.slot == NO_SLOT:
                self.redundant[entry.id] = entry
            else:
                self._unfinished.put(entry)
            if stage is QUEUED:
                self._queued.put(entry)
            else:
                self._held[entry.actor][entry.id] = entry

    def _leave(self, entry: Entry) -> None:
        stage = entry.stage
        del self._in[stage][entry.id]
        if stage in UNFINISHED:
            if entry.slot == NO_SLOT:
                del self.redundant[entry.id]
            if stage is not QUEUED:
                del self._held[entry.actor][entry.id]
