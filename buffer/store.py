"""All that the buffer holds: each active group with its stage and its slot, and the ledger. No I/O.

    Admit ────► RUNNING ───Push───► WAITING ───Serve──► SERVED ───Finish──► (gone: counted as trained)
                 │   ▲               │   ▲                │
         Requeue │   │ Lease         │   └────Unserve─────┘
        HandBack ▼   │               │
                QUEUED ◄──Requeue────┘        Drop, Filter: from any stage ──► (gone: counted by reason)

    RUNNING ──Recall──► RECALLED ──HandBack──► QUEUED       the group is broken off

A scheduler may start *redundant* groups: more than a batch has places. They run without a slot (NO_SLOT). A finished
redundant group takes the slot of an unfinished group (Place), which then is redundant itself. A group that can no
longer get a slot is deferred: it joins a queue, first in, first out, from which the scheduler may take groups.

    Admit ──► REDUNDANT ──Place──► RUNNING, and then WAITING
               │ ▲
         Defer │ └── the group that had the slot, if it runs; DEFERRED at once if it was QUEUED
       Requeue ▼
              DEFERRED ──Readmit──► QUEUED

RECALLED may have a slot; RUNNING, QUEUED, WAITING and SERVED have one; REDUNDANT and DEFERRED have none. A group that
leaves untrained gives its slot back, and the next one takes the lowest that is free.

Only `Store.apply` changes the store (but for notes on leases). `buffer.groups` decides and makes an event, the journal
writes it, the store applies it; after a crash `buffer.recovery` applies the same events. Conservation holds after every
event: admitted = trained + filtered + dropped (by reason) + active.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import NotRequired, TypedDict

import numpy as np

from areal_like.wire.groups import CALL, FINISHES, RUN, Head, samples_of, versions_of
from areal_like.wire.messages import PartialHead
from buffer import events
from buffer.results import Results
from buffer.segment_file import Extent, Payload, Read, Stored
from buffer.staleness import Bound, Slots

NO_SLOT = -1
SLACK = 64
"""A heap is rebuilt when its outdated items exceed the number of groups by more than this."""
_COPIED = ("admitted", "trained", "pushes", "staleness_max", "scheduler", "decided", "planned")
_COPIED_OF_ENTRY = tuple(name for name in events.Held.__struct_fields__ if name not in ("stored", "left"))
"""Fields of a store, and of an entry, that a snapshot has under the same names."""
_ABORTED = FINISHES.index("abort")


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
UNFINISHED = (*LEASED, Stage.QUEUED)


@dataclass(frozen=True)
class PartialGroup:
    """The samples that an actor handed back, undecoded (see `areal_like.wire.groups`), until another lease continues
    them. A lease may carry a sample only if the bound lets all its tokens be trained in the group's slot."""

    head: PartialHead
    payload: Payload

    def usable(self, least: float) -> dict[int, int]:
        """Sample index → version of its oldest token, for samples without a token of before `least`."""
        return {index: min(made) for index, made in versions_of(self.head).items() if min(made) >= least}

    @cached_property
    def lengths(self) -> dict[int, tuple[int, bool]]:
        """Sample index → response tokens so far, and whether the sample was cut; for samples that have begun."""
        tokens, calls = Counter[int](), np.frombuffer(self.head.calls, CALL)
        for index, n in zip(samples_of(self.head), np.frombuffer(self.head.runs, RUN)["n"].tolist(), strict=True):
            tokens[index] += n
        aborted = set(calls["sample"][calls["finish"] == _ABORTED].tolist())
        return {index: (count, index in aborted) for index, count in tokens.items()}

    @property
    def ended(self) -> int:
        """Samples that have begun and were not cut."""
        return sum(not cut for _, cut in self.lengths.values())

    @property
    def newest(self) -> int:
        """Version of its newest token."""
        return max(self.head.digests)


@dataclass(slots=True)
class Entry:
    """One active group. Times are in seconds of the monotonic clock."""

    id: int
    row: int
    slot: int
    launch: int
    need: int
    stage: Stage
    actor: str = ""  # holder of its lease
    lease_version: int = 0  # no token is older: version of the actor's weights, or of the oldest carried token
    admitted_at: float = 0.0
    pushed_at: float = 0.0
    pushed: int = -1  # its place in the order of finishing
    version_at_push: int = 0
    head: Head | None = None  # of the push, like the payload
    payload: Payload = b""
    pushed_by: str = ""  # the actor that pushed it
    batch: int = -1  # if SERVED
    partial: PartialGroup | None = None  # from earlier leases, until the group is pushed
    was_deferred: bool = False
    task: str = ""  # of a mixture
    cut: tuple[int, ...] = ()  # tokens of samples that it did not wait for

    # Notes on its leases, by `buffer.server`, `.deadlines` and `.dispatch`; not kept over a restart.
    moved_at: float = 0.0  # when it was leased or last made progress
    holders: tuple[str, ...] = ()  # all actors that had a lease of it, the present one included
    refused: int = 0  # refused pushes
    timeouts: int = 0  # leases revoked because they made no progress
    deaths: int = 0  # of actors that held it and died by themselves
    failed_on: str = ""  # the last actor whose push was refused or whose lease was revoked: another should try

    def leased_to(self, actor: str, version: int) -> None:
        self.actor, self.lease_version = actor, version
        if actor and actor not in self.holders:
            self.holders = (*self.holders, actor)

    @property
    def size(self) -> int:
        """Payload bytes of the group, partial ones included."""
        return len(self.payload) + (len(self.partial.payload) if self.partial else 0)

    @property
    def to_run(self) -> int:
        """Sequences that its next lease will run; samples that have ended need no engine."""
        return max(1, self.launch - self.partial.ended) if self.partial else self.launch

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
        if self.oldest >= allowed:
            return self.oldest
        return min((version for version in self.head.versions if version >= allowed), default=None)


class Ledger(TypedDict):
    """Where every admitted group is: admitted = trained + sum(filtered) + sum(dropped) + active. `tasks`: the same of
    each task of a mixture."""

    admitted: int
    trained: int
    filtered: dict[str, int]
    dropped: dict[str, int]
    active: int
    tasks: NotRequired[dict[str, Ledger]]


def ledger_of(counts: Mapping[str, int], active: int) -> Ledger:
    """The ledger of one task, from its counts by fate."""
    by_kind: dict[str, dict[str, int]] = {"filtered": {}, "dropped": {}}
    for fate, count in counts.items():
        kind, colon, reason = fate.partition(": ")
        if colon:
            by_kind[kind][reason] = count
    admitted, trained = (counts.get(fate, 0) for fate in ("admitted", "trained"))
    return {"admitted": admitted, "trained": trained, "active": active, **by_kind}  # type: ignore[typeddict-item]


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

    def first(self) -> int | None:
        """The group with the lowest slot; None if empty."""
        while self._heap:
            slot, group_id = self._heap[0]
            if self._slots.get(group_id) == slot:
                return group_id
            heapq.heappop(self._heap)
        return None


class EventError(RuntimeError):
    """An event names groups that do not exist. The journal may already hold the event, so the process must end."""


class Store:
    """`entries`: active groups by id. `redundant`: those with a lease and no slot. `planned`: batch → ids, of batches
    from before a crash that will be served again; `replans`: how often such plans became void. `scheduler`: its state
    when the last batch was opened; `decided`: the same for each open batch that is not trained. `read`: reads the
    payloads that a snapshot names. `results`: for samplers."""

    def __init__(self, bound: Bound, results: Results | None = None):
        self.bound, self.slots = bound, Slots()
        self.read: Read | None = None
        self.entries: dict[int, Entry] = {}
        self.admitted = self.trained = self.pushes = self.bytes = self.staleness_max = 0
        self.filtered, self.dropped = Counter[str](), Counter[str]()
        self.tasks: dict[str, Counter[str]] = {}  # of a mixture → fates
        self.scheduler: object = None
        self.decided: dict[int, object] = {}
        self.planned: dict[int, list[int]] = {}
        self.replans = 0
        self.results = results
        self._clear()
        self._appliers: dict[type[events.Event], Callable[..., None]] = {
            each: getattr(self, f"_{each.__name__.lower()}") for each in events.Event.__args__
        }

    def apply(self, event: events.Event, payload: Payload = b"", now: float = 0.0) -> None:
        """Change the store by `event`. Raises EventError if the event does not fit the store."""
        try:
            self._appliers[type(event)](event, payload, now)
        except KeyError as error:
            raise EventError(f"{event!r:.200} does not fit what has happened before: no {error}") from error

    # ---- looking in -------------------------------------------------------------------------------------------------

    def of(self, *stages: Stage) -> list[Entry]:
        """The groups in these stages; within each stage in order of arrival."""
        return list(chain.from_iterable(self._in[stage].values() for stage in stages))

    def count(self, *stages: Stage) -> int:
        return sum(map(len, map(self._in.__getitem__, stages)))

    def held_by(self, actor: str) -> dict[int, Entry]:
        """The groups that this actor has a lease of, by id."""
        return self._held.get(actor, {})

    @property
    def first_deferred(self) -> Entry | None:
        """The group that has been DEFERRED for the longest time."""
        return next(iter(self._in[Stage.DEFERRED].values()), None)

    @property
    def first_queued(self) -> Entry | None:
        """The QUEUED group with the lowest slot."""
        found = self._queued.first()
        return None if found is None else self.entries[found]

    @property
    def lowest_open(self) -> tuple[int, int | None] | None:
        """(slot, holder) of the lowest slot without a group to serve; the holder is None if the slot is free. None if
        there is no such slot among those taken so far."""
        held = self._unfinished.first()
        free = self.slots.next if self.slots.free else None
        if held is None:
            return None if free is None else (free, None)
        slot = self.entries[held].slot
        return (slot, held) if free is None or slot < free else (free, None)

    def ledger(self) -> Ledger:
        found: Ledger = {
            "admitted": self.admitted,
            "trained": self.trained,
            "filtered": dict(self.filtered),
            "dropped": dict(self.dropped),
            "active": len(self.entries),
        }
        if self.tasks:
            active = Counter(entry.task for entry in self.entries.values())
            found["tasks"] = {task: ledger_of(counts, active[task]) for task, counts in self.tasks.items()}
        return found

    def levels(self) -> dict[str, object]:
        """Counts of groups by stage and by fate, for metrics."""
        stages = (Stage.DEFERRED, Stage.QUEUED, Stage.WAITING, Stage.SERVED)
        found: dict[str, object] = {f"buffer/{stage}": self.count(stage) for stage in stages}
        found |= {"buffer/running": self.count(*LEASED), "buffer/bytes": self.bytes}
        found |= {"ledger/admitted": self.admitted, "ledger/trained": self.trained, "ledger/active": len(self.entries)}
        found |= {f"ledger/filtered/{reason}": n for reason, n in self.filtered.items()}
        found |= {f"ledger/dropped/{reason}": n for reason, n in self.dropped.items()}
        for task, counts in self.tasks.items():
            found |= {f"ledger_of/{task}/{fate.replace(': ', '/')}": n for fate, n in counts.items()}
        return found

    def _count(self, entry: Entry, fate: str) -> None:
        if entry.task:
            self.tasks.setdefault(entry.task, Counter())[fate] += 1

    def payloads(self) -> list[Stored]:
        """All payloads of groups that are in the journal."""
        held = [each for e in self.entries.values() for each in (e.payload, e.partial.payload if e.partial else b"")]
        return [each for each in held if isinstance(each, Stored)]

    # ---- one group --------------------------------------------------------------------------------------------------

    def _admit(self, event: events.Admit, _: Payload, now: float) -> None:
        slot, stage = (NO_SLOT, Stage.REDUNDANT) if event.redundant else (self.slots.take(), Stage.RUNNING)
        entry = Entry(event.id, event.row, slot, event.launch, event.need, stage, admitted_at=now)
        entry.task = event.task
        entry.leased_to(event.actor, event.version)
        self.entries[entry.id] = entry
        self._count(entry, "admitted")
        self._enter(entry)
        self.admitted += 1
        if self.results:
            self.results.admit(event.id, event.task, event.row)

    def _lease(self, event: events.Lease, *_: object) -> None:
        entry = self.entries[event.id]
        if not event.resumes:
            self._set_partial(entry, None)
        entry.leased_to(event.actor, event.version)
        entry.cut = ()
        self._move(entry, Stage.RUNNING)

    def _recall(self, event: events.Recall, *_: object) -> None:
        self._move(self.entries[event.id], Stage.RECALLED)

    def _handback(self, event: events.HandBack, payload: Payload, _: float) -> None:
        self._set_partial(self.entries[event.id], PartialGroup(event.head, payload))
        self._requeue(event)

    def _requeue(self, event: events.Requeue | events.HandBack, *_: object) -> None:
        """The group's lease, or its push, is void. A group without a slot is deferred."""
        entry = self.entries[event.id]
        self.bytes -= len(entry.payload)
        entry.head, entry.payload = None, b""
        if entry.slot == NO_SLOT:
            self._enqueue(entry)
        else:
            self._move(entry, Stage.QUEUED)

    def _forget(self, event: events.Forget, *_: object) -> None:
        self._set_partial(self.entries[event.id], None)

    def _leaveout(self, event: events.LeaveOut, *_: object) -> None:
        self.entries[event.id].cut = event.cut

    def _push(self, event: events.Push, payload: Payload, now: float) -> None:
        entry = self.entries[event.head.id]
        if entry.partial:
            self._set_partial(entry, None)
        entry.head, entry.payload, entry.pushed_by = event.head, payload, event.actor
        entry.pushed_at, entry.version_at_push, entry.pushed = now, event.version, self.pushes
        self._move(entry, Stage.WAITING)
        self.pushes += 1
        self.bytes += len(payload)
        if self.results:
            self.results.push(entry.id, entry.task, entry.row, event.head.rewards)

    def _place(self, event: events.Place, *_: object) -> None:
        winner = self.entries[event.id]
        if event.loser is None:
            slot = self.slots.take()
        else:
            loser = self.entries[event.loser]
            slot = loser.slot
            if loser.stage is Stage.QUEUED:
                self._enqueue(loser)
            else:
                self._move(loser, Stage.REDUNDANT if loser.stage is Stage.RUNNING else loser.stage, NO_SLOT)
        self._move(winner, Stage.RUNNING if winner.stage is Stage.REDUNDANT else winner.stage, slot)

    def _defer(self, event: events.Defer, *_: object) -> None:
        self._enqueue(self.entries[event.id])

    def _enqueue(self, entry: Entry) -> None:
        entry.was_deferred = True
        self._move(entry, Stage.DEFERRED, NO_SLOT)

    def _readmit(self, event: events.Readmit, *_: object) -> None:
        entry = self.entries[event.id]
        entry.launch, entry.need = event.launch, event.need
        self._move(entry, Stage.QUEUED, self.slots.take())

    def _drop(self, event: events.Drop, *_: object) -> None:
        self._remove(self.entries[event.id], f"dropped: {event.reason}")
        self.dropped[event.reason] += 1

    def _filter(self, event: events.Filter, *_: object) -> None:
        self._remove(self.entries[event.id], f"filtered: {event.reason}")
        self.filtered[event.reason] += 1

    def _remove(self, entry: Entry, fate: str) -> None:
        del self.entries[entry.id]
        self._leave(entry)
        self._count(entry, fate)
        self.bytes -= entry.size
        if fate != "trained" and entry.slot != NO_SLOT:
            self.slots.release(entry.slot)
        if self.results:
            self.results.leave(entry.id)

    def _set_partial(self, entry: Entry, left: PartialGroup | None) -> None:
        """Keep `left` for the next lease, in place of an earlier partial group."""
        self.bytes -= entry.size
        entry.partial = left
        self.bytes += entry.size

    # ---- batches ----------------------------------------------------------------------------------------------------

    def _open(self, event: events.Open, *_: object) -> None:
        if event.scheduler is not None:
            self.decided[event.batch] = event.scheduler
        self.scheduler = event.scheduler
        self.bound.batches.open(event.groups)
        if self.results:
            self.results.open()

    def _settle(self, event: events.Settle, *_: object) -> None:
        for group_id, slot in event.slots.items():
            self.entries[group_id].slot = slot
            for order in (self._unfinished, self._queued):
                if group_id in order:
                    order.put(group_id, slot)
        self.slots = Slots(event.end)

    def _serve(self, event: events.Serve, *_: object) -> None:
        version = self.bound.batch_version(event.batch)
        for slot, group_id in enumerate(event.ids, self.bound.batches.first(event.batch)):
            entry = self.entries[group_id]
            entry.batch = event.batch
            self._move(entry, Stage.SERVED, slot)
            oldest = entry.oldest_trained(event.oldest_allowed)
            self.staleness_max = max(self.staleness_max, 0 if oldest is None else version - oldest)
        self.planned.pop(event.batch, None)

    def _unserve(self, event: events.Unserve, *_: object) -> None:
        for entry in self.of(Stage.SERVED):
            if entry.batch >= event.batch:
                self._move(entry, Stage.WAITING)
        self.planned = {batch: ids for batch, ids in self.planned.items() if batch < event.batch}
        self.replans += 1

    def _finish(self, event: events.Finish, *_: object) -> None:
        for entry in self.of(Stage.SERVED):
            if entry.batch == event.batch:
                self._remove(entry, "trained")
                self.trained += 1
        self.decided.pop(event.batch, None)
        self.bound.batches.forget(event.batch + 1)

    def _replan(self, *_: object) -> None:
        self.planned = {}
        self.replans += 1

    def _serveagain(self, event: events.ServeAgain, *_: object) -> None:
        self.planned[event.batch] = event.ids

    # ---- the run ----------------------------------------------------------------------------------------------------

    def _begin(self, event: events.Begin, *_: object) -> None:
        """Plan to serve batches from `event.batch` on again. All leases end."""
        served: dict[int, list[int]] = {}  # from a snapshot; `planned` has later events of the same batch already
        for entry in sorted(self.of(Stage.SERVED), key=lambda entry: entry.slot):
            served.setdefault(entry.batch, []).append(entry.id)
            self._move(entry, Stage.WAITING)
        plans = served | self.planned
        self.planned = {batch: ids for batch, ids in sorted(plans.items()) if batch >= event.batch}
        for entry in self.of(*UNFINISHED):
            entry.holders = ()
            if entry.slot == NO_SLOT:
                self._enqueue(entry)
            else:
                self._move(entry, Stage.QUEUED)

    def _branch(self, *_: object) -> None:
        """The groups concerned have their own events."""

    def _snapshot(self, event: events.Snapshot, _: Payload, now: float) -> None:
        for name in _COPIED:
            setattr(self, name, getattr(event, name))
        self.filtered, self.dropped = Counter(event.filtered), Counter(event.dropped)
        self.tasks = {task: Counter(counts) for task, counts in event.tasks.items()}
        self.slots = Slots(event.slots[0], list(event.slots[1]))
        self.bound.batches.load(event.batches)
        if self.results and event.results:
            self.results.load(event.results)
        self._clear()
        for held in event.groups:
            copied = {name: getattr(held, name) for name in _COPIED_OF_ENTRY}
            entry = Entry(**copied, admitted_at=now, pushed_at=now)
            entry.stage = Stage(entry.stage)
            entry.payload = self._stored(held.stored)
            if held.left:
                entry.partial = PartialGroup(held.left[0], self._stored(held.left[1]))
            self.entries[entry.id] = entry
            self._enter(entry)
        self.bytes = sum(entry.size for entry in self.entries.values())

    def _stored(self, extent: tuple[int, int, int, int] | None) -> Payload:
        return Stored(self.read, extent=Extent(*extent)) if extent else b""

    def snapshot(self) -> events.Snapshot:
        """The whole store as an event. All payloads must be written before: the snapshot has their places."""
        facts = {name: getattr(self, name) for name in (*_COPIED, "filtered", "dropped", "tasks")}
        groups = [_held(entry) for entry in self.of(*Stage)]  # by stage, to keep the order of the queue
        facts |= {
            "slots": (self.slots.end, list(self.slots.free)),
            "batches": self.bound.batches.state(),
            "groups": groups,
        }
        return events.Snapshot(**facts, results=self.results.state() if self.results else None)

    # ---- where everything is ----------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self.entries.clear()
        self.redundant: dict[int, Entry] = {}
        self._in: dict[Stage, dict[int, Entry]] = {stage: {} for stage in Stage}
        self._held: dict[str, dict[int, Entry]] = {}
        self._unfinished, self._queued = BySlot(), BySlot()

    def _move(self, entry: Entry, stage: Stage, slot: int | None = None) -> None:
        """Move to another stage and, if `slot` is given, to another slot. A group without a lease has no actor."""
        self._leave(entry)
        entry.stage = stage
        if slot is not None:
            entry.slot = slot
        if stage in (Stage.QUEUED, Stage.DEFERRED):
            entry.actor = ""
        self._enter(entry)

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


def _held(entry: Entry) -> events.Held:
    stored = _extent(entry.payload) if len(entry.payload) else None
    left = (entry.partial.head, _extent(entry.partial.payload)) if entry.partial else None
    return events.Held(**{name: getattr(entry, name) for name in _COPIED_OF_ENTRY}, stored=stored, left=left)


def _extent(payload: Payload) -> Extent:
    if not isinstance(payload, Stored) or payload.extent is None:
        raise TypeError("a snapshot can't hold a payload that is not in the journal")
    return payload.extent
