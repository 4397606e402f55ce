"""The life of every group, and the ledger that accounts for it. No I/O; time is passed in.

    admit ──► RUNNING ──push──► WAITING ──serve──► SERVED ──trained──► (gone: counted as trained)
               │   ▲               │
       requeue ▼   │ assign        │ drop
              QUEUED               ▼
               └────── drop ───► (gone: counted as filtered, or dropped by reason)

RUNNING: leased to an actor. QUEUED: its actor was lost, it needs another. WAITING: pushed, ready to be served.
SERVED: handed to the learner, until the learner says that it is trained. A group that leaves without being trained
gives its slot back, and the next admitted group takes the lowest free one.

Conservation holds after every call: admitted = trained + filtered + dropped (by reason) + active.

Every change is first told to `record` (the journal), and `restore` makes the same changes from such records, so the
state after a crash is the state before it: `buffer.journal` has the bytes, this file the meaning.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from buffer.admission import Bound
from buffer.journal import SNAPSHOT, JournalError, Record

Policy = Callable[..., tuple[int, ...]]
Recorder = Callable[[str, list[Any], bytes | memoryview], None]


def _record_nothing(kind: str, fields: list[Any], payload: bytes | memoryview) -> None:
    """The recorder of a buffer without a journal."""


class Stage(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    WAITING = "waiting"
    SERVED = "served"


@dataclass(slots=True)
class Entry:
    """One active group. `meta` and `payload` are the pushed message's, undecoded; times are in seconds."""

    id: int
    row: int
    slot: int
    launch: int
    need: int
    stage: Stage
    actor: str
    admitted_at: float
    pushed_at: float = 0.0
    version_at_push: int = 0
    meta: dict[str, Any] | None = None
    payload: bytes | memoryview = b""
    batch: int = -1


class Replay:
    """Holds the active groups, gives out slots, picks batches, keeps the ledger."""

    def __init__(self, bound: Bound, policy: Policy | partial, staleness_policy: str = "drop"):
        self.bound = bound
        self.policy = policy
        self.staleness_policy = staleness_policy
        self.record: Recorder = _record_nothing
        self.entries: dict[int, Entry] = {}
        self.admitted = 0
        self.trained = 0
        self.filtered: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.requeued = 0
        self.duplicates = 0
        self.bytes = 0
        self.staleness_max = 0
        self._next_slot = 0
        self._free_slots: list[int] = []

    # ---- slots ------------------------------------------------------------------------------------------------------

    @property
    def next_slot(self) -> int:
        """The slot that the next admitted group gets."""
        return self._free_slots[0] if self._free_slots else self._next_slot

    @property
    def admitted_slots(self) -> int:
        """Slots in use or trained."""
        return self._next_slot - len(self._free_slots)

    def room(self, version: int) -> float:
        """How many groups an actor that holds `version` could start before the bound stops it (may be inf)."""
        horizon = self.bound.horizon(version)
        return max(0, horizon - self._next_slot) + sum(slot < horizon for slot in self._free_slots)

    # ---- life-cycle -------------------------------------------------------------------------------------------------

    def admit(self, group_id: int, row: int, launch: int, need: int, actor: str, now: float) -> Entry:
        self.record("admit", [group_id, row, launch, need], b"")
        slot = self.next_slot
        if self._free_slots:
            heapq.heappop(self._free_slots)
        else:
            self._next_slot += 1
        entry = Entry(group_id, row, slot, launch, need, Stage.RUNNING, actor, now)
        self.entries[group_id] = entry
        self.admitted += 1
        return entry

    def requeue(self, group_id: int) -> None:
        """RUNNING or WAITING → QUEUED: what was rolled out is lost or too old; the group keeps its slot."""
        entry = self.entries[group_id]
        if entry.stage is Stage.WAITING:
            self.record("requeue", [group_id], b"")
        self.bytes -= len(entry.payload)
        entry.stage, entry.actor, entry.meta, entry.payload = Stage.QUEUED, "", None, b""
        self.requeued += 1

    def queued_for(self, version: int) -> Entry | None:
        """The QUEUED group of the lowest slot that weights of `version` may still fill."""
        entries = [entry for entry in self.entries.values() if entry.stage is Stage.QUEUED]
        entry = min(entries, key=lambda entry: entry.slot, default=None)
        return entry if entry and self.bound.admits(entry.slot, version) else None

    def assign(self, entry: Entry, actor: str) -> None:
        """QUEUED → RUNNING."""
        entry.stage, entry.actor = Stage.RUNNING, actor

    def push(self, meta: dict[str, Any], payload: bytes | memoryview, version: int, now: float) -> bool:
        """RUNNING or QUEUED → WAITING. False if the group is not expected (a duplicate, or dropped before).

        Taken from whoever has it: a lease that was given anew keeps its id, and the first push wins.
        """
        entry = self.entries.get(meta["id"])
        if entry is None or entry.stage in (Stage.WAITING, Stage.SERVED):
            self.duplicates += 1
            return False
        self.record("push", [meta, version], payload)
        entry.stage, entry.meta, entry.payload = Stage.WAITING, meta, payload
        entry.pushed_at, entry.version_at_push = now, version
        self.bytes += len(payload)
        return True

    def drop(self, group_id: int, reason: str) -> None:
        """Any stage → gone, counted under `reason`; its slot is free again."""
        self.record("drop", [group_id, reason], b"")
        self._remove(group_id)
        self.dropped[reason] += 1

    def filter(self, group_id: int, reason: str) -> None:
        """Like `drop`, for groups that were rolled out well and are not worth training on."""
        self.record("filter", [group_id, reason], b"")
        self._remove(group_id)
        self.filtered[reason] += 1

    def _remove(self, group_id: int) -> None:
        entry = self.entries.pop(group_id)
        self.bytes -= len(entry.payload)
        heapq.heappush(self._free_slots, entry.slot)

    # ---- serving ----------------------------------------------------------------------------------------------------

    def serve(self, batch: int) -> list[Entry]:
        """The groups of batch `batch`, WAITING → SERVED, or [] if they are not all there.

        The bound is checked here once more, against what the actors really pushed; a group that breaks it is never
        served: it is dropped as "stale", or rolled out again (`staleness_policy: requeue`).
        """
        version = self.bound.batch_version(batch)
        for entry in self.in_stage(Stage.WAITING):
            if version - self.oldest(entry) <= self.bound.max_staleness:
                continue
            if self.staleness_policy == "requeue":
                self.requeue(entry.id)
            else:
                self.drop(entry.id, "stale")
        waiting = {entry.slot: entry.id for entry in self.in_stage(Stage.WAITING)}
        missing = {entry.slot for entry in self.entries.values() if entry.stage in (Stage.RUNNING, Stage.QUEUED)}
        ids = self.policy(waiting, missing | set(self._free_slots), self.bound.groups_per_batch)
        if ids:
            self.record("serve", [batch, list(ids)], b"")
        return self._mark_served(batch, ids)

    def _mark_served(self, batch: int, ids: Iterable[int]) -> list[Entry]:
        version = self.bound.batch_version(batch)
        picked = [self.entries[group_id] for group_id in ids]
        for entry in picked:
            entry.stage, entry.batch = Stage.SERVED, batch
            self.staleness_max = max(self.staleness_max, version - self.oldest(entry))
        return picked

    def finish(self, batch: int) -> int:
        """The learner has trained `batch`: its groups leave. Returns how many."""
        self.record("finish", [batch], b"")
        done = [entry for entry in self.in_stage(Stage.SERVED) if entry.batch == batch]
        for entry in done:
            del self.entries[entry.id]
            self.bytes -= len(entry.payload)
        self.trained += len(done)
        return len(done)

    # ---- after a crash ----------------------------------------------------------------------------------------------

    def restore(self, records: Iterable[Record], next_batch: int, now: float) -> None:
        """Make the recorded changes, as far as the learner's checkpoint has them: batches from `next_batch` on were
        not trained, and what was served of them waits again. Groups that ran are QUEUED.

        Call it on an empty Replay, before `record` is set. Raises JournalError.
        """
        for record in records:
            if record.kind == SNAPSHOT:
                self._load_snapshot(record, now)
            else:
                self._redo(record, next_batch, now)
        for batch in {entry.batch for entry in self.in_stage(Stage.SERVED) if entry.batch < next_batch}:
            self.finish(batch)  # trained, but the crash came before the learner could say so
        for entry in self.entries.values():
            if entry.stage is Stage.SERVED:
                entry.stage, entry.batch = Stage.WAITING, -1
            elif entry.stage is Stage.RUNNING:
                entry.stage, entry.actor = Stage.QUEUED, ""

    def _redo(self, record: Record, next_batch: int, now: float) -> None:
        fields = record.fields
        match record.kind:
            case "admit":
                group_id, row, launch, need = fields
                self.admit(group_id, row, launch, need, "", now)
            case "push":
                self.push(fields[0], record.payload, fields[1], now)
            case "requeue":
                self.requeue(fields[0])
            case "drop":
                self.drop(*fields)
            case "filter":
                self.filter(*fields)
            case "serve":
                if fields[0] < next_batch:
                    self._mark_served(*fields)
            case "finish":
                if fields[0] < next_batch:
                    self.finish(fields[0])
            case _:
                raise JournalError(f"unknown kind of record {record.kind!r}: the journal is of another version")

    def snapshot(self) -> tuple[list[Any], bytes]:
        """The state as (fields, payloads), for a journal's new segment."""
        entries = list(self.entries.values())
        rows = [
            [e.id, e.row, e.slot, e.launch, e.need, e.stage.value, e.version_at_push, e.meta, e.batch] for e in entries
        ]
        left = [dict(self.filtered), dict(self.dropped)]
        counts = [self.admitted, self.trained, *left, self.requeued, self.staleness_max]
        return [counts, self._next_slot, list(self._free_slots), rows], b"".join(entry.payload for entry in entries)

    def _load_snapshot(self, record: Record, now: float) -> None:
        counts, self._next_slot, self._free_slots, rows = record.fields
        self.admitted, self.trained, filtered, dropped, self.requeued, self.staleness_max = counts
        self.filtered, self.dropped = Counter(filtered), Counter(dropped)
        self.entries.clear()
        start = 0
        for group_id, row, slot, launch, need, stage, version, meta, batch in rows:
            size = meta["bytes"] if meta else 0
            payload = record.payload[start : start + size]
            start += size
            self.entries[group_id] = Entry(
                group_id, row, slot, launch, need, Stage(stage), "", now, now, version, meta, payload, batch
            )
        self.bytes = start

    # ---- looking in -------------------------------------------------------------------------------------------------

    @staticmethod
    def oldest(entry: Entry) -> int:
        assert entry.meta is not None
        return entry.meta["oldest"]

    def in_stage(self, stage: Stage) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.stage is stage]

    def ledger(self) -> dict[str, Any]:
        """Where every admitted group is: admitted = trained + sum(filtered) + sum(dropped) + active."""
        return {
            "admitted": self.admitted,
            "trained": self.trained,
            "filtered": dict(self.filtered),
            "dropped": dict(self.dropped),
            "active": len(self.entries),
        }
