"""The content of the buffer: each active group with its stage and its slot, and the ledger. No I/O.

    Admit ────► RUNNING ───Push───► WAITING ───Serve──► SERVED ───Finish──► (gone: counted as trained)
                 │   ▲               │   ▲                │
         Requeue │   │ Lease         │   └────Unserve─────┘
                 ▼   │               │
                QUEUED ◄──Requeue────┘        Drop, Filter: from any stage ──► (gone: counted by reason)

    RUNNING ──Recall──► RECALLED ──Requeue──► QUEUED        the group is broken off

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

Only `Store.apply` changes the store (but for notes on leases): `buffer.groups` makes an event, the journal writes it,
the store applies it, also after a crash. After every event: admitted = trained + filtered + dropped (by reason) +
active.
"""

from collections.abc import Callable

from areal_like.wire.stored import Extent, Payload, Read, Stored
from buffer import events
from buffer.entries import (
    DEFERRED,
    NO_SLOT,
    QUEUED,
    RECALLED,
    REDUNDANT,
    RUNNING,
    SERVED,
    UNFINISHED,
    WAITING,
    Entries,
    Entry,
    Stage,
)
from buffer.ledger import Counts, Ledger
from buffer.staleness import Bound, Slots

_COPIED = ("pushes", "staleness_max", "scheduler", "decided", "planned")
_OF_ENTRY = tuple(name for name in events.Held.__struct_fields__ if name != "stored")
"""Fields of the store, and of an entry, that a snapshot has under the same names."""


class EventError(RuntimeError):
    """An event names groups that do not exist. The journal may already hold the event, so the process must end."""


class Store:
    """`entries`: the active groups. `counts`: of all groups by fate. `planned`: batch → ids, of batches from before a
    crash that will be served again; `replans`: how often such plans became void. `scheduler`: its state when the last
    batch was opened; `decided`: the same for each open batch that is not trained. `read`: reads the payloads that a
    snapshot names."""

    def __init__(self, bound: Bound):
        self.bound, self.slots = bound, Slots()
        self.entries, self.counts = Entries(), Counts()
        self.pushes = self.bytes = self.staleness_max = self.replans = 0
        self.scheduler: object = None
        self.decided: dict[int, object] = {}
        self.planned: dict[int, list[int]] = {}
        self.read: Read | None = None
        self._appliers: dict[type[events.Event], Callable[..., None]] = {
            each: getattr(self, f"_{each.__name__.lower()}") for each in events.Event.__args__
        }

    def apply(self, event: events.Event, payload: Payload = b"", now: float = 0.0) -> None:
        """Change the store by `event`. Raises EventError if the event does not fit the store."""
        try:
            self._appliers[type(event)](event, payload, now)
        except KeyError as error:
            raise EventError(f"{event!r:.200} does not fit what has happened before: no {error}") from error

    def ledger(self) -> Ledger:
        return self.counts.ledger([entry.task for entry in self.entries.values()])

    def payloads(self) -> list[Stored]:
        """All payloads of groups that are in the journal."""
        return [entry.payload for entry in self.entries.values() if isinstance(entry.payload, Stored)]

    def _admit(self, event: events.Admit, _: Payload, now: float) -> None:
        slot, stage = (NO_SLOT, REDUNDANT) if event.redundant else (self.slots.take(), RUNNING)
        entry = Entry(event.id, event.row, slot, event.launch, event.need, stage, event.actor, event.version, now)
        entry.task, entry.holders = event.task, (event.actor,) if event.actor else ()
        self.entries.add(entry)
        self.counts.note(entry.task, "admitted")

    def _lease(self, event: events.Lease, *_: object) -> None:
        entry = self.entries[event.id]
        entry.actor, entry.lease_version, entry.cut = event.actor, event.version, ()
        if event.actor not in ("", *entry.holders):
            entry.holders = (*entry.holders, event.actor)
        self.entries.move(entry, RUNNING)

    def _recall(self, event: events.Recall, *_: object) -> None:
        self.entries.move(self.entries[event.id], RECALLED)

    def _requeue(self, event: events.Requeue, *_: object) -> None:
        """The group's lease, or its push, is void. A group without a slot is deferred."""
        entry = self.entries[event.id]
        self.bytes -= len(entry.payload)
        entry.head, entry.payload = None, b""
        if entry.slot == NO_SLOT:
            self._enqueue(entry)
        else:
            self.entries.move(entry, QUEUED)

    def _leaveout(self, event: events.LeaveOut, *_: object) -> None:
        self.entries[event.id].cut = event.cut

    def _push(self, event: events.Push, payload: Payload, now: float) -> None:
        entry = self.entries[event.head.id]
        entry.head, entry.payload, entry.pushed_by = event.head, payload, event.actor
        entry.pushed_at, entry.version_at_push, entry.pushed = now, event.version, self.pushes
        self.entries.move(entry, WAITING)
        self.pushes += 1
        self.bytes += len(payload)

    def _place(self, event: events.Place, *_: object) -> None:
        winner = self.entries[event.id]
        if event.loser is None:
            slot = self.slots.take()
        else:
            loser = self.entries[event.loser]
            slot = loser.slot
            if loser.stage is QUEUED:
                self._enqueue(loser)
            else:
                self.entries.move(loser, REDUNDANT if loser.stage is RUNNING else loser.stage, NO_SLOT)
        self.entries.move(winner, RUNNING if winner.stage is REDUNDANT else winner.stage, slot)

    def _defer(self, event: events.Defer, *_: object) -> None:
        self._enqueue(self.entries[event.id])

    def _enqueue(self, entry: Entry) -> None:
        entry.was_deferred = True
        self.entries.move(entry, DEFERRED, NO_SLOT)

    def _readmit(self, event: events.Readmit, *_: object) -> None:
        entry = self.entries[event.id]
        entry.launch, entry.need = event.launch, event.need
        self.entries.move(entry, QUEUED, self.slots.take())

    def _drop(self, event: events.Drop, *_: object) -> None:
        self._remove(entry := self.entries[event.id])
        self.counts.note(entry.task, f"dropped: {event.reason}")

    def _filter(self, event: events.Filter, *_: object) -> None:
        self._remove(entry := self.entries[event.id])
        self.counts.note(entry.task, f"filtered: {event.reason}")

    def _remove(self, entry: Entry, *, trained: bool = False) -> None:
        self.entries.remove(entry)
        self.bytes -= len(entry.payload)
        if not trained and entry.slot != NO_SLOT:
            self.slots.release(entry.slot)

    def _open(self, event: events.Open, *_: object) -> None:
        if event.scheduler is not None:
            self.decided[event.batch] = event.scheduler
        self.scheduler = event.scheduler
        self.bound.batches.open(event.groups)

    def _settle(self, event: events.Settle, *_: object) -> None:
        for group_id, slot in event.slots.items():
            self.entries.reslot(self.entries[group_id], slot)
        self.slots.reset(event.end)

    def _serve(self, event: events.Serve, *_: object) -> None:
        version = self.bound.batch_version(event.batch)
        for slot, group_id in enumerate(event.ids, self.bound.batches.first(event.batch)):
            entry = self.entries[group_id]
            entry.batch = event.batch
            self.entries.move(entry, SERVED, slot)
            oldest = entry.oldest_trained(event.oldest_allowed)
            self.staleness_max = max(self.staleness_max, 0 if oldest is None else version - oldest)
        self.planned.pop(event.batch, None)

    def _unserve(self, event: events.Unserve, *_: object) -> None:
        for entry in self.entries.of(SERVED):
            if entry.batch >= event.batch:
                self.entries.move(entry, WAITING)
        self.planned = {batch: ids for batch, ids in self.planned.items() if batch < event.batch}
        self.replans += 1

    def _finish(self, event: events.Finish, *_: object) -> None:
        for entry in self.entries.of(SERVED):
            if entry.batch == event.batch:
                self._remove(entry, trained=True)
                self.counts.note(entry.task, "trained")
        self.decided.pop(event.batch, None)
        self.bound.batches.forget(event.batch + 1)

    def _replan(self, *_: object) -> None:
        self.planned = {}
        self.replans += 1

    def _serveagain(self, event: events.ServeAgain, *_: object) -> None:
        self.planned[event.batch] = event.ids

    def _begin(self, event: events.Begin, *_: object) -> None:
        """Plan to serve batches from `event.batch` on again. All leases end."""
        served: dict[int, list[int]] = {}  # from a snapshot; `planned` has later events of the same batch already
        for entry in sorted(self.entries.of(SERVED), key=lambda entry: entry.slot):
            served.setdefault(entry.batch, []).append(entry.id)
            self.entries.move(entry, WAITING)
        plans = served | self.planned
        self.planned = {batch: ids for batch, ids in sorted(plans.items()) if batch >= event.batch}
        for entry in self.entries.of(*UNFINISHED):
            entry.holders = ()
            if entry.slot == NO_SLOT:
                self._enqueue(entry)
            else:
                self.entries.move(entry, QUEUED)

    def _branch(self, *_: object) -> None:
        """The groups concerned have their own events."""

    def _snapshot(self, event: events.Snapshot, _: Payload, now: float) -> None:
        for name in _COPIED:
            setattr(self, name, getattr(event, name))
        self.counts = Counts(event.fates)
        self.slots.reset(*event.slots)
        self.bound.batches.load(event.batches)
        self.entries.clear()
        for held in event.groups:
            entry = Entry(**{name: getattr(held, name) for name in _OF_ENTRY}, admitted_at=now, pushed_at=now)
            entry.stage, entry.payload = Stage(entry.stage), self._stored(held.stored)
            self.entries.add(entry)
        self.bytes = sum(len(entry.payload) for entry in self.entries.values())

    def snapshot(self) -> events.Snapshot:
        """The whole store as an event. All payloads must be in the journal: the snapshot has their places."""
        return events.Snapshot(
            **{name: getattr(self, name) for name in _COPIED},
            fates={task: dict(counts) for task, counts in self.counts.fates.items()},
            slots=(self.slots.end, list(self.slots.free)),
            batches=self.bound.batches.state(),
            groups=[_held(entry) for entry in self.entries.of(*Stage)],  # by stage, to keep the order of the queue
        )

    def _stored(self, extent: Extent | None) -> Payload:
        return Stored(self.read, extent=extent) if extent else b""


def _held(entry: Entry) -> events.Held:
    stored = _extent(entry.payload) if len(entry.payload) else None
    return events.Held(**{name: getattr(entry, name) for name in _OF_ENTRY}, stored=stored)


def _extent(payload: Payload) -> Extent:
    if not isinstance(payload, Stored) or payload.extent is None:
        raise TypeError("a snapshot can't hold a payload that is not in the journal")
    return payload.extent
