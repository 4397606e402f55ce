"""The groups that are active, their changes of stage (`buffer.entries`), and the ledger. No I/O; time is passed in.

Conservation holds after every call: admitted = trained + filtered + dropped (by reason) + active.

Every change is first told to `record` (the journal), and `buffer.recovery` makes the same changes from such records,
so the state after a crash is the state before it: `buffer.journal` has the bytes, this file the meaning.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from areal_like.groups import Head, pack_heads
from buffer import filters
from buffer.admission import Bound
from buffer.entries import Entry, Recorder, Stage, record_nothing
from buffer.partials import Partial
from buffer.policies import Waiting
from buffer.slots import Holder, Slots, place, rescue

Policy = Callable[..., Sequence[int]]
Filter = Callable[..., str]


class Replay:
    """Holds the active groups, gives out slots, picks batches, keeps the ledger.

    `policy` see `buffer.policies`, `group_filter` see `buffer.filters`. `staleness_policy` says what becomes of a
    group that breaks the bound, or would by waiting longer: see `serve`. `resume`: what actors hand back of unfinished
    groups is gone on from; else they begin anew.
    """

    def __init__(
        self,
        bound: Bound,
        policy: Policy | partial,
        staleness_policy: str = "drop",
        group_filter: Filter | partial = filters.none,
        resume: bool = True,
        slots: Slots | None = None,
    ):
        self.bound = bound
        self.policy = policy
        self.staleness_policy = staleness_policy
        self.group_filter = None if getattr(group_filter, "func", group_filter) is filters.none else group_filter
        self.resume = resume
        self.record: Recorder = record_nothing
        self.entries: dict[int, Entry] = {}
        self._stages: dict[Stage, dict[int, Entry]] = {stage: {} for stage in Stage}
        self._eldest = -math.inf  # no group that waits or runs has a youth below this: see `_expire`
        self.slots = slots or Slots()
        self.planned: dict[int, list[int]] = {}  # batch → ids: served before a crash, to be served again
        self.admitted = 0
        self.trained = 0
        self.filtered: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.requeued = 0
        self.duplicates = 0
        self.pushes = 0
        self.bytes = 0
        self.staleness_max = 0
        self.resumed = 0
        self._revoked: list[tuple[str, int]] = []
        self._recalled: list[tuple[str, int]] = []

    @property
    def admitted_slots(self) -> int:
        """Slots in use or trained."""
        return self.slots.used

    def room(self, version: int) -> float:
        """How many groups an actor that holds `version` could start before the bound stops it (may be inf)."""
        return self.slots.open_to(version, self.bound.horizon(version))

    # ---- life-cycle -------------------------------------------------------------------------------------------------

    def admit(self, group_id: int, row: int, launch: int, need: int, actor: str, version: int, now: float) -> Entry:
        """A new group, RUNNING on an actor that holds `version`."""
        self.record("admit", [group_id, row, launch, need], b"")
        entry = Entry(group_id, row, self.slots.take(), launch, need, Stage.RUNNING, actor, version, now)
        self.add(entry)
        self.admitted += 1
        return entry

    def add(self, entry: Entry) -> None:
        """A group that was admitted, here or before a crash."""
        self.entries[entry.id] = self._stages[entry.stage][entry.id] = entry
        self._note_age(entry)

    def clear(self) -> None:
        """Forget all groups."""
        self.entries.clear()
        self._stages = {stage: {} for stage in Stage}

    def move(self, entry: Entry, stage: Stage) -> None:
        """To another stage, with what goes with it set before."""
        del self._stages[entry.stage][entry.id]
        entry.stage = stage
        self._stages[stage][entry.id] = entry
        self._note_age(entry)

    def _note_age(self, entry: Entry) -> None:
        youth = self._youth(entry)
        if youth < self._eldest:
            self._eldest = youth

    def requeue(self, group_id: int) -> None:
        """RUNNING or WAITING → QUEUED, in its slot: what was rolled out is lost or too old, save `Entry.partial`."""
        entry = self.entries[group_id]
        if entry.stage is Stage.WAITING:
            self.record("requeue", [group_id], b"")
        self.bytes -= len(entry.payload)
        entry.actor, entry.head, entry.payload, entry.recalled = "", None, b"", False
        self.move(entry, Stage.QUEUED)
        self.requeued += 1

    def recall(self, group_id: int) -> None:
        """Ask the actor of a RUNNING group to hand it back (`take_recalled`); until it does, the group runs."""
        entry = self.entries[group_id]
        if not entry.recalled:
            entry.recalled = True
            self._recalled.append((entry.actor, group_id))

    def hand_back(self, group_id: int, left: Partial | None) -> None:
        """RUNNING → QUEUED; what was sampled, if there is any, replaces what the lease had carried."""
        if left and self.resume:
            self.record("partial", [left.meta], left.payload)
            self.keep(self.entries[group_id], left)
        self.requeue(group_id)

    def keep(self, entry: Entry, left: Partial | None) -> None:
        """Hold `left` for the next lease, in place of an earlier one."""
        self.bytes -= entry.size
        entry.partial = left
        self.bytes += entry.size

    def queued_for(self, version: int) -> Entry | None:
        """The QUEUED group of the lowest slot that weights of `version` may still fill."""
        entries = (entry for entry in self._stages[Stage.QUEUED].values() if self.slots.fits(entry.slot, version))
        entry = min(entries, key=lambda entry: entry.slot, default=None)
        return entry if entry and self.bound.admits(entry.slot, version) else None

    def assign(self, entry: Entry, actor: str, version: int) -> dict[int, int]:
        """QUEUED → RUNNING on an actor that holds `version`.

        Returns which samples of `entry.partial` the lease may carry (see `Partial.usable`): those that the bound allows
        in the group's slot. A partial of which none is left is let go.
        """
        carried = entry.partial.usable(self._oldest_resumable(entry.slot)) if entry.partial else {}
        if carried:
            self.resumed += 1
        else:
            self.keep(entry, None)
        entry.actor, entry.lease_version = actor, min([version, *carried.values()])
        self.move(entry, Stage.RUNNING)
        return carried

    def _oldest_resumable(self, slot: int) -> float:
        """Tokens of this version or newer may be trained in `slot`; with `mask_tokens` older ones do no harm."""
        return -math.inf if self.staleness_policy == "mask_tokens" else self.bound.oldest(slot)

    def push(self, head: Head, payload: bytes | memoryview, version: int, now: float) -> bool:
        """RUNNING or QUEUED → WAITING, or gone if the filter rejects it. `version`: the newest that is published.

        False if the group is not expected (a duplicate, or dropped before). Taken from whoever has it: a lease that
        was given anew keeps its id, and the first push wins.
        """
        entry = self.entries.get(head.id)
        if entry is None or entry.stage in (Stage.WAITING, Stage.SERVED):
            self.duplicates += 1
            return False
        reason = self.group_filter(head.rewards, head.lengths) if self.group_filter else ""
        if reason:
            self._record_push(head, b"", version)  # for whoever looks into the journal: its payload is not needed
            self.filter(entry.id, reason)
        else:
            self._record_push(head, payload, version)
            self.accept(entry, head, payload, version, now)
        return True

    def _record_push(self, head: Head, payload: bytes | memoryview, version: int) -> None:
        if self.record is not record_nothing:
            self.record("push", [pack_heads([head]), version], payload)

    def accept(self, entry: Entry, head: Head, payload: bytes | memoryview, version: int, now: float) -> None:
        """→ WAITING, whatever the filter says."""
        self.keep(entry, None)
        entry.head, entry.payload = head, payload
        entry.pushed_at, entry.version_at_push, entry.pushed = now, version, self.pushes
        self.move(entry, Stage.WAITING)
        self.pushes += 1
        self.bytes += len(payload)

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
        entry = self._forget(group_id)
        self.slots.give_back(entry.slot)

    def _forget(self, group_id: int) -> Entry:
        entry = self.entries.pop(group_id)
        del self._stages[entry.stage][group_id]
        self.bytes -= entry.size
        return entry

    # ---- serving ----------------------------------------------------------------------------------------------------

    def serve(self, batch: int) -> list[Entry]:
        """The groups of batch `batch`, WAITING → SERVED, or [] if they are not all there.

        The policy chooses. The bound is checked here once more, against what the actors really pushed: a group that
        breaks it is never served. What is left behind gets new slots if the order was changed. Of a group that would
        be too old for every batch from this one on, `staleness_policy` makes:

            drop         it leaves as "stale", running or not
            requeue      it is rolled out again; samples of it that began late enough are kept (if `resume`)
            mask_tokens  it is served as long as a token is young enough; the others are not trained (`oldest_allowed`)
            wait         it does not come to that: the batch before is held until the group is there, and takes it

        A batch that was served before a crash is served again with the same groups.
        """
        ids = self._planned_for(batch)
        if not ids:
            self._expire(self.bound.batch_version(batch))
            ids = self._choose(batch)
            if not self._within_bound(batch, ids):
                raise RuntimeError(f"batch {batch} would break the staleness bound of {self.bound.max_staleness}")
        if ids:
            self._settle(batch, ids)
            self.record("serve", [batch, list(ids), self.oldest_allowed(batch)], b"")
        return self.mark_served(batch, ids)

    def oldest_allowed(self, batch: int) -> int:
        """Tokens of older versions are not to be trained in `batch`. 0 but for `staleness_policy: mask_tokens`."""
        if self.staleness_policy != "mask_tokens" or math.isinf(self.bound.max_staleness):
            return 0
        return max(0, self.bound.batch_version(batch) - int(self.bound.max_staleness))

    def take_revoked(self) -> list[tuple[str, int]]:
        """(actor, group id) of the leases that have ended because their groups got too old while they ran."""
        revoked, self._revoked = self._revoked, []
        return revoked

    def take_recalled(self) -> list[tuple[str, int]]:
        """(actor, group id) of the leases that are to be handed back."""
        recalled, self._recalled = self._recalled, []
        return recalled

    def _planned_for(self, batch: int) -> Sequence[int]:
        ids = self.planned.pop(batch, ())
        if self._stages[Stage.WAITING].keys() >= set(ids) and self._within_bound(batch, ids):
            return ids
        self.planned.clear()  # a group has left since, or the bound is another: the order of before can't be kept
        return ()

    def _within_bound(self, batch: int, ids: Iterable[int]) -> bool:
        oldest = (self.entries[group_id].oldest_trained(self.oldest_allowed(batch)) for group_id in ids)
        ages = (self.bound.batch_version(batch) - each for each in oldest if each is not None)
        return max(ages, default=0) <= self.bound.max_staleness

    def _expire(self, version: int) -> None:
        """Part with what is too old to be trained at `version`. Looks only if there may be something."""
        if version - self._eldest <= self.bound.max_staleness:
            return
        kept: list[float] = []
        for entry in list(self.entries.values()):
            youth = self._youth(entry)
            if version - youth <= self.bound.max_staleness:
                kept.append(youth)
                continue
            if entry.stage is Stage.RUNNING:
                if self.staleness_policy == "wait":
                    kept.append(youth)
                    continue  # its actor may have had newer weights when it began
                if self.staleness_policy == "requeue" and self.resume:
                    self.recall(entry.id)  # samples that waited for a place in the engine are younger than the lease
                    kept.append(youth)
                    continue
                self._revoked.append((entry.actor, entry.id))
            if self.staleness_policy == "requeue":
                self.requeue(entry.id)
            else:
                self.drop(entry.id, "stale")
        self._eldest = min(kept, default=math.inf)

    def _youth(self, entry: Entry) -> float:
        """The version that says how long a group can still wait."""
        masks = self.staleness_policy == "mask_tokens"
        if entry.stage is Stage.WAITING and entry.head:
            return entry.head.newest if masks else entry.head.oldest
        if entry.stage is Stage.RUNNING and not masks:
            return entry.lease_version
        return math.inf  # its tokens are yet to come, or served

    def _choose(self, batch: int) -> Sequence[int]:
        """The policy's choice, corrected where `staleness_policy: wait` asks for it."""
        want, version = self.bound.groups_per_batch, self.bound.batch_version(batch)
        if len(self._stages[Stage.WAITING]) < want:
            return ()
        waiting = [self._view(entry, version) for entry in self._stages[Stage.WAITING].values()]
        missing = {entry.slot for stage in (Stage.RUNNING, Stage.QUEUED) for entry in self._stages[stage].values()}
        ids = self.policy(waiting, missing | self.slots.unfilled((batch + 1) * want), want)
        if ids and (len(ids) != want or len(set(ids)) != want or not {each.id for each in waiting}.issuperset(ids)):
            raise ValueError(f"the policy chose {list(ids)} where {want} of the waiting groups make a batch")
        if ids and self.staleness_policy == "wait":
            return rescue(ids, self._holders(), (batch + 1) * want)
        return ids

    def _view(self, entry: Entry, version: int) -> Waiting:
        left = self.bound.max_staleness - (version - self._youth(entry))
        assert entry.head is not None
        return Waiting(entry.id, entry.slot, entry.oldest, entry.pushed, left, entry.head)

    def _holders(self) -> list[Holder]:
        return [
            Holder(
                entry.id,
                entry.slot,
                self.bound.horizon(self._youth(entry)),
                here=entry.stage is Stage.WAITING,
                running=entry.stage is Stage.RUNNING,
                wish=self._wish(entry),
            )
            for entry in self.entries.values()
            if entry.stage is not Stage.SERVED
        ]

    def _wish(self, entry: Entry) -> float:
        """The deadline of a group that begins anew if it is missed."""
        queued = entry.stage is Stage.QUEUED and entry.partial and self.staleness_policy != "mask_tokens"
        return self.bound.horizon(entry.partial.oldest) if queued and entry.partial else math.inf

    def _settle(self, batch: int, ids: Sequence[int]) -> None:
        """The batch gets its own slots. If they were not those of its groups, all others get new ones behind it."""
        first, end = (self.bound.groups_per_batch * number for number in (batch, batch + 1))
        in_its_slots = {self.entries[group_id].slot for group_id in ids} == set(range(first, end))
        for slot, group_id in enumerate(ids, first):
            self.entries[group_id].slot = slot
        if not in_its_slots:
            self.place_all(end, leave_out=ids)

    def place_all(self, first: int, leave_out: Iterable[int]) -> None:
        """New slots for what is not served, from `first` on: the oldest tokens first, and no gaps."""
        skip = set(leave_out)
        slots = place((holder for holder in self._holders() if holder.id not in skip), first)
        for group_id, slot in slots.items():
            self.entries[group_id].slot = slot
        self.slots = Slots(first + len(slots))

    def mark_served(self, batch: int, ids: Iterable[int]) -> list[Entry]:
        version, allowed = self.bound.batch_version(batch), self.oldest_allowed(batch)
        picked = [self.entries[group_id] for group_id in ids]
        for entry in picked:
            self.slots.check(entry, version)
            entry.batch = batch
            self.move(entry, Stage.SERVED)
            oldest = entry.oldest_trained(allowed)
            self.staleness_max = max(self.staleness_max, 0 if oldest is None else version - oldest)
        return picked

    def finish(self, batch: int) -> int:
        """The learner has trained `batch`: its groups leave. Returns how many."""
        self.record("finish", [batch], b"")
        done = [entry for entry in self.in_stage(Stage.SERVED) if entry.batch == batch]
        for entry in done:
            self._forget(entry.id)
        self.trained += len(done)
        return len(done)

    # ---- looking in -------------------------------------------------------------------------------------------------

    def in_stage(self, stage: Stage) -> list[Entry]:
        return list(self._stages[stage].values())

    def count(self, stage: Stage) -> int:
        return len(self._stages[stage])

    def ledger(self) -> dict[str, Any]:
        """Where every admitted group is: admitted = trained + sum(filtered) + sum(dropped) + active."""
        return {
            "admitted": self.admitted,
            "trained": self.trained,
            "filtered": dict(self.filtered),
            "dropped": dict(self.dropped),
            "active": len(self.entries),
        }
