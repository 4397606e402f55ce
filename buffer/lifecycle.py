"""What happens to groups, one at a time, and the ledger: the changes of stage that `buffer.entries` draws. No I/O; time
is passed in.

Conservation holds after every call: admitted = trained + filtered + dropped (by reason) + active.

Every change is first told to `record` (the journal), and `buffer.recovery` makes the same changes from such records,
so the state after a crash is the state before it: `buffer.journal` has the bytes, this file the meaning.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import replace
from functools import partial
from typing import Any

from areal_like.groups import Head, pack_heads
from buffer import filters
from buffer.admission import Bound
from buffer.entries import NO_SLOT, Entry, Recorder, Stage, record_nothing
from buffer.partials import Partial
from buffer.payloads import Payload
from buffer.slots import Slots
from buffer.stages import Stages

Filter = Callable[..., str]


class LifeCycle:
    """Holds the active groups and their slots, keeps the ledger. `buffer.replay` serves them.

    `staleness_policy` says what becomes of a group that breaks the bound: see `Replay.serve`. `group_filter` see
    `buffer.filters`. `resume`: what actors hand back of unfinished groups is gone on from; else they begin anew.
    """

    def __init__(
        self,
        bound: Bound,
        staleness_policy: str = "drop",
        group_filter: Filter | partial = filters.none,
        resume: bool = True,
        slots: Slots | None = None,
    ):
        self.bound = bound
        self.staleness_policy = staleness_policy
        self.group_filter = None if getattr(group_filter, "func", group_filter) is filters.none else group_filter
        self.resume = resume
        self.record: Recorder = record_nothing
        self.entries: dict[int, Entry] = {}
        self._stages = Stages()
        self._eldest = -math.inf  # no group that waits or runs has a youth below this: see `_expire`
        self.slots = slots or Slots()
        self.admitted = self.trained = self.requeued = self.resumed = 0
        self.filtered: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.pushes = self.duplicates = self.bytes = 0
        self.staleness_max = 0
        self.spares: dict[int, Entry] = {}  # RUNNING or QUEUED without a slot
        self.deferrals = 0
        self.scheduler_state: Any = None  # as of the batch that was opened last: see `open_batch`
        self.decided: dict[int, Any] = {}  # the same of all batches that are open and not trained
        self._revoked: list[tuple[str, int]] = []
        self._recalled: list[tuple[str, int]] = []
        self._losers_recalled_at: tuple[int, ...] = ()

    # ---- admission --------------------------------------------------------------------------------------------------

    @property
    def admitted_slots(self) -> int:
        """Slots in use or trained."""
        return self.slots.used

    def room(self, version: int) -> float:
        """How many groups an actor that holds `version` could start before the bound stops it (may be inf)."""
        return self.slots.open_to(version, self.bound.horizon(version))

    # ---- life-cycle -------------------------------------------------------------------------------------------------

    def open_batch(self, groups: int, scheduler_state: Any) -> None:
        """The next batch has so many groups. `scheduler_state`, if there is any, goes into the journal with it."""
        if scheduler_state is not None:
            self.record("open", [self.bound.batches.opened, groups, scheduler_state], b"")
            self.decided[self.bound.batches.opened] = scheduler_state
        self.scheduler_state = scheduler_state
        self.bound.batches.open(groups)

    def admit(
        self,
        group_id: int,
        row: int,
        launch: int,
        need: int,
        actor: str,
        version: int,
        now: float,
        spare: bool = False,
    ) -> Entry:
        """A new group, RUNNING on an actor that holds `version`, in the next slot or, `spare`, in none."""
        self.record("admit", [group_id, row, launch, need, *[True][:spare]], b"")
        slot = NO_SLOT if spare else self.slots.take()
        entry = Entry(group_id, row, slot, launch, need, Stage.RUNNING, "", version, now)
        entry.leased_to(actor)
        self.add(entry)
        self.admitted += 1
        return entry

    def add(self, entry: Entry) -> None:
        """A group that was admitted, here or before a crash."""
        self.entries[entry.id] = entry
        self._stages.enter(entry)
        if entry.slot == NO_SLOT and entry.stage in (Stage.RUNNING, Stage.QUEUED):
            self.spares[entry.id] = entry
        self._note_age(entry)

    def clear(self) -> None:
        """Forget all groups."""
        self.entries.clear()
        self.spares.clear()
        self._stages = Stages()

    def move(self, entry: Entry, stage: Stage) -> None:
        """To another stage, with what goes with it set before."""
        self._stages.leave(entry)
        entry.stage = stage
        self._stages.enter(entry)
        if stage is Stage.WAITING or stage is Stage.RUNNING:  # the others have no age
            self._note_age(entry)

    def _note_age(self, entry: Entry) -> None:
        youth = self._youth(entry)
        if youth < self._eldest:
            self._eldest = youth

    def _youth(self, entry: Entry) -> float:
        """The version that says how long a group can still wait."""
        masks = self.staleness_policy == "mask_tokens"
        if entry.stage is Stage.WAITING and entry.head:
            return entry.head.newest if masks else entry.head.oldest
        if entry.stage is Stage.RUNNING and entry.slot != NO_SLOT and not masks:
            return entry.lease_version
        return math.inf  # its tokens are yet to come, or served, or it has no place to be trained in

    def requeue(self, group_id: int) -> None:
        """RUNNING or WAITING → QUEUED, in its slot: what was rolled out is lost or too old, save `Entry.partial`.
        A spare group is DEFERRED, unless it only `moves`."""
        entry = self.entries[group_id]
        if entry.stage is Stage.WAITING:
            self.record("requeue", [group_id], b"")
        self.bytes -= len(entry.payload)
        entry.actor, entry.head, entry.payload, entry.recalled = "", None, b"", False
        if entry.slot == NO_SLOT and not entry.moves:
            self.defer(group_id)
            return
        self.move(entry, Stage.QUEUED)
        self.requeued += 1

    def defer(self, group_id: int) -> None:
        """RUNNING or QUEUED, without a slot → DEFERRED, behind all others there."""
        self.record("defer", [group_id], b"")
        entry = self.entries[group_id]
        self.spares.pop(group_id, None)
        entry.actor, entry.recalled, entry.moves, entry.deferred = "", False, False, True
        self.move(entry, Stage.DEFERRED)
        self.deferrals += 1

    def take_up(self, group_id: int, launch: int, need: int) -> Entry:
        """DEFERRED → QUEUED, in the next slot, with as many samples as its new batch asks for."""
        self.record("take_up", [group_id, launch, need], b"")
        entry = self.entries[group_id]
        entry.slot, entry.launch, entry.need = self.slots.take(), launch, need
        self.move(entry, Stage.QUEUED)
        return entry

    def give_place(self, group_id: int, loser: int | None) -> None:
        """A spare group that is about to be pushed gets the slot of `loser`, which becomes a spare one, or a free slot
        (None)."""
        self.record("place", [group_id, loser], b"")
        entry = self.spares.pop(group_id)
        if loser is None:
            self._stages.set_slot(entry, self.slots.take())
            return
        other = self.entries[loser]
        self._stages.set_slot(entry, other.slot)
        self._stages.set_slot(other, NO_SLOT)
        self.spares[loser] = other

    def recall(self, group_id: int, move: bool = False) -> None:
        """Ask the actor of a RUNNING group to hand it back (`take_recalled`); until it does, the group runs. `move`: it
        is to go on elsewhere, also if it is a spare one."""
        entry = self.entries[group_id]
        if not entry.recalled:
            entry.recalled, entry.moves = True, move
            self._recalled.append((entry.actor, group_id))

    def hand_back(self, group_id: int, left: Partial | None) -> None:
        """RUNNING → QUEUED, or DEFERRED; what was sampled, if there is any, replaces what the lease had carried."""
        if left and self.resume:
            held = self.record("partial", [left.meta], left.payload)
            self.keep(self.entries[group_id], replace(left, payload=held))
        self.requeue(group_id)

    def keep(self, entry: Entry, left: Partial | None) -> None:
        """Hold `left` for the next lease, in place of an earlier one."""
        self.bytes -= entry.size
        entry.partial = left
        self.bytes += entry.size

    def queued_for(self, version: int, avoided_by: str = "") -> Entry | None:
        """The QUEUED group of the lowest slot that weights of `version` may still fill; spare ones come last, and those
        not at all that the actor `avoided_by` could not do."""
        entry = self._stages.first(Stage.QUEUED)
        if entry and not self._fits(entry, version, avoided_by):  # rare: `injection`, `Entry.avoid`
            found = [each for each in self._stages[Stage.QUEUED].values() if self._fits(each, version, avoided_by)]
            entry = min(found, key=lambda entry: (entry.slot == NO_SLOT, entry.slot), default=None)
        slot = self._aim(entry) if entry else None
        return entry if slot is not None and self.bound.admits(slot, version) else None

    def _fits(self, entry: Entry, version: int, avoided_by: str) -> bool:
        avoided = avoided_by and entry.avoid == avoided_by
        return not avoided and (entry.slot == NO_SLOT or self.slots.fits(entry.slot, version))

    def _aim(self, entry: Entry) -> int | None:
        """The slot that a group is rolled out for: its own, or the first that a spare one may still win."""
        if entry.slot != NO_SLOT:
            return entry.slot
        lowest = self.lowest_open()
        return lowest[0] if lowest else None

    def assign(self, entry: Entry, actor: str, version: int) -> dict[int, int]:
        """QUEUED → RUNNING on an actor that holds `version`.

        Returns which samples of `entry.partial` the lease may carry (see `Partial.usable`): those that the bound allows
        in the group's slot. A partial of which none is left is let go.
        """
        carried = self.usable(entry)
        if carried:
            self.resumed += 1
        else:
            self.keep(entry, None)
        entry.leased_to(actor)
        entry.lease_version, entry.moves, entry.cut = min([version, *carried.values()]), False, ()
        self.move(entry, Stage.RUNNING)
        return carried

    def usable(self, entry: Entry) -> dict[int, int]:
        """Of what earlier leases have left: sample → version of its oldest token, as far as a lease may carry it."""
        slot = self._aim(entry)
        carried = entry.partial.usable(self._oldest_resumable(slot)) if entry.partial and slot is not None else {}
        return {index: oldest for index, oldest in carried.items() if index < entry.launch}

    def _oldest_resumable(self, slot: int) -> float:
        """Tokens of this version or newer may be trained in `slot`; with `mask_tokens` older ones do no harm."""
        return -math.inf if self.staleness_policy == "mask_tokens" else self.bound.oldest(slot)

    def push(self, head: Head, payload: Payload, version: int, now: float) -> bool:
        """RUNNING or QUEUED → WAITING, or gone if the filter rejects it. `version`: the newest that is published.

        False if the group is not expected (a duplicate, dropped before, or deferred meanwhile). Taken from whoever has
        it: a lease that was given anew keeps its id, and the first push wins.
        """
        entry = self.entries.get(head.id)
        if entry is None or not self._expected(entry, head):
            self.duplicates += 1
            return False
        reason = self.group_filter(head.rewards, head.lengths) if self.group_filter else ""
        if reason:
            self._record_push(head, b"", version)  # for whoever looks into the journal: its payload is not needed
            self.filter(entry.id, reason)
        elif entry.slot == NO_SLOT and not self._wins_place(entry, head):
            self.defer(entry.id)
            return False
        else:
            held = self._record_push(head, payload, version)
            self.accept(entry, head, held, version, now)
        return True

    def _expected(self, entry: Entry, head: Head) -> bool:
        """What was rolled out before its group was deferred is of no use after."""
        if entry.stage not in (Stage.RUNNING, Stage.QUEUED):
            return False
        if not entry.deferred or entry.slot == NO_SLOT:
            return True
        return head.samples == entry.need and self.bound.admits(entry.slot, head.oldest)

    def _wins_place(self, entry: Entry, head: Head) -> bool:
        """A free slot that may hold these tokens, or that of the first group that is not there yet. Who was recalled
        has lost: a place that is open now is one of a later round, whose groups may be of another size."""
        if entry.recalled and not entry.moves:
            return False
        lowest = self.lowest_open()
        if lowest is None or not self.bound.admits(lowest[0], head.oldest):
            return False
        loser = lowest[1]
        self.give_place(entry.id, loser)
        if loser is not None and self.entries[loser].stage is Stage.QUEUED and not self.entries[loser].moves:
            self.defer(loser)
        return True

    def lowest_open(self) -> tuple[int, int | None] | None:
        """(slot, its holder) of the first place that was given out and holds nothing to serve yet; the holder is None
        where the slot is free. None if there is no such place."""
        held = self._stages.lowest((Stage.RUNNING, Stage.QUEUED))
        if self.slots.free and (held is None or self.slots.next < held.slot):
            return self.slots.next, None
        return (held.slot, held.id) if held else None

    @property
    def _facts(self) -> tuple[int, ...]:
        """As long as this stays the same, so does who can be served, and who has lost."""
        return self._stages.changes, self.slots.changes, self.bound.batches.opened

    def recall_losers(self) -> None:
        """Recall spare groups for which there is no place left that could hold their tokens; those that are between two
        actors are DEFERRED now."""
        if not self.spares or self._losers_recalled_at == self._facts:
            return
        running = [entry for entry in self.spares.values() if not entry.recalled or entry.moves]
        lowest = self.lowest_open() if running else None
        for entry in running:
            if lowest is None or not self.bound.admits(lowest[0], entry.lease_version):
                if entry.stage is Stage.QUEUED:
                    self.defer(entry.id)
                else:
                    self.recall(entry.id)
                    entry.moves = False
        self._losers_recalled_at = self._facts

    def leave_out(self, group_id: int, cut: tuple[int, ...], redrawn: list[str]) -> None:
        """Samples of a RUNNING group that will not be in it: those not waited for, and why others were drawn anew."""
        self.record("left_out", [group_id, list(cut), redrawn], b"")
        self.entries[group_id].cut = cut

    def _record_push(self, head: Head, payload: Payload, version: int) -> Payload:
        if self.record is record_nothing:
            return payload
        return self.record("push", [pack_heads([head]), version], payload)

    def accept(self, entry: Entry, head: Head, payload: Payload, version: int, now: float) -> None:
        """→ WAITING, whatever the filter says."""
        self.keep(entry, None)
        entry.head, entry.payload, entry.moves = head, payload, False
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
        if entry.slot != NO_SLOT:
            self.slots.give_back(entry.slot)

    def _forget(self, group_id: int) -> Entry:
        entry = self.entries.pop(group_id)
        self.spares.pop(group_id, None)
        self._stages.leave(entry)
        self.bytes -= entry.size
        return entry

    # ---- looking in -------------------------------------------------------------------------------------------------

    def in_stage(self, stage: Stage) -> list[Entry]:
        return list(self._stages[stage].values())

    @property
    def running(self) -> Set[int]:
        """Ids of the groups that are leased."""
        return self._stages[Stage.RUNNING].keys()

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
