"""What is to happen to groups: decided here, made an event, told to the journal, and applied (`buffer.store`). No I/O.

Time is passed in. All changes go through `Replay.commit`, so that what a crash leaves in the journal makes the same
store again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from areal_like.groups import Head
from buffer import events, filters
from buffer.partials import PartialGroup
from buffer.payloads import Payload
from buffer.policies import WAIT_FOR_GAPS, Waiting
from buffer.staleness import Bound, Holder, Slots, place, rescue
from buffer.store import LEASED, NO_SLOT, UNFINISHED, Entry, Stage, Store

Policy = Callable[..., Sequence[int]]
Filter = Callable[..., str]


Lost = Callable[[Head, Payload, str, str], None]
"""Head, payload, reason, who pushed it."""


def keep_nothing(head: Head, payload: Payload, why: str, actor: str) -> None:
    """A `Lost` for who keeps no samples."""


class Replay:
    """Decides what becomes of each group, and picks the groups of batches.

    `policy` see `buffer.policies`, `group_filter` see `buffer.filters`. `staleness_policy` says what becomes of a group
    that breaks the bound: see `serve`. `resume`: what actors hand back of unfinished groups is gone on from; else they
    begin anew. `record` is told of every event, `lost` of finished groups that will not be trained.
    """

    def __init__(
        self,
        bound: Bound,
        policy: Policy,
        staleness_policy: str = "drop",
        group_filter: Filter = filters.none,
        resume: bool = True,
        slots: Slots | None = None,
    ):
        self.bound, self.policy, self.staleness_policy, self.resume = bound, policy, staleness_policy, resume
        self.group_filter = None if getattr(group_filter, "func", group_filter) is filters.none else group_filter
        self.record: events.Recorder = events.record_nothing
        self.lost: Lost = keep_nothing
        self.store = Store(bound, slots)
        self.duplicates = 0
        self._waits_for_gaps = getattr(policy, "func", policy) in WAIT_FOR_GAPS
        self._oldest_limit = -math.inf  # no group that waits or runs is limited by a version below this: see `_expire`
        self._replans = 0  # `Store.replans` when that was looked at last
        self._undecided = (-1, -1)  # a batch, and `Store.changes` when there was nothing to serve
        self._losers_recalled_at = -1  # `Store.changes`
        self._cancels: list[tuple[str, int, bool]] = []

    def commit(self, event: events.Event, payload: Payload = b"", now: float = 0.0) -> None:
        """It happens: the journal is told first."""
        self.store.apply(event, self.record(event, payload), now)

    # ---- leases -----------------------------------------------------------------------------------------------------

    def room(self, version: int) -> float:
        """How many groups an actor that holds `version` could start before the bound stops it (may be inf)."""
        return self.store.slots.open_to(version, self.bound.deadline(version))

    def admit(
        self,
        group_id: int,
        row: int,
        launch: int,
        need: int,
        actor: str,
        version: int,
        now: float,
        redundant: bool = False,
    ) -> Entry:
        """A new group, RUNNING on an actor that holds `version`, in the next slot or, `redundant`, in none."""
        self.commit(events.Admit(group_id, row, launch, need, actor, version, redundant), now=now)
        entry = self.store.entries[group_id]
        self._note_age(entry)
        return entry

    def queued_for(self, version: int, not_on: str = "") -> Entry | None:
        """The group that needs a lease and has the lowest slot that weights of `version` may still fill, those
        left out that the actor `not_on` could not do."""
        entry = self.store.first_queued
        if entry and not self._fits(entry, version, not_on):  # rare: `injection`, `Entry.failed_on`
            found = [each for each in self.store.of(Stage.QUEUED) if self._fits(each, version, not_on)]
            entry = min(found, key=lambda entry: entry.slot, default=None)
        return entry if entry and self.bound.admits(entry.slot, version) else None

    def _fits(self, entry: Entry, version: int, not_on: str) -> bool:
        failed = not_on and entry.failed_on == not_on
        return not failed and self.store.slots.fits(entry.slot, version)

    def assign(self, entry: Entry, actor: str, version: int) -> dict[int, int]:
        """A group that needs a lease runs on an actor that holds `version`.

        Returns which samples of `entry.partial` the lease may carry (see `PartialGroup.usable`): those that the bound
        allows in the group's slot. A partial group of which none is left is let go.
        """
        carried = self.usable(entry)
        self.commit(events.Lease(entry.id, actor, min([version, *carried.values()]), bool(carried)))
        self._note_age(entry)
        return carried

    def usable(self, entry: Entry) -> dict[int, int]:
        """Of what earlier leases have left: sample → version of its oldest token, as far as a lease may carry it."""
        carried = entry.partial.usable(self._oldest_resumable(entry.slot)) if entry.partial else {}
        return {index: oldest for index, oldest in carried.items() if index < entry.launch}

    def _oldest_resumable(self, slot: int) -> float:
        """Tokens of this version or newer may be trained in `slot`; with `mask_tokens` older ones do no harm."""
        return -math.inf if self.staleness_policy == "mask_tokens" else self.bound.oldest(slot)

    def recall(self, group_id: int) -> None:
        """Ask the actor that has a group's lease to hand it back (`take_cancels`); until it does, the group runs."""
        entry = self.store.entries[group_id]
        if entry.stage is not Stage.RECALLED:
            self.commit(events.Recall(group_id))
            self._cancels.append((entry.actor, group_id, True))

    def hand_back(self, group_id: int, left: PartialGroup | None) -> None:
        """The actor does not go on; what it has sampled, if anything, replaces what the lease had carried."""
        if left and self.resume:
            self.commit(events.HandBack(group_id, left.head), left.payload)
        else:
            self.requeue(group_id)

    def requeue(self, group_id: int) -> None:
        """A group that was leased, or WAITING, needs another lease: what was rolled out is lost or too old, save
        `Entry.partial`. A redundant group is DEFERRED, unless it only moves."""
        self.commit(events.Requeue(group_id))

    def drop(self, group_id: int, reason: str) -> None:
        """Any stage → gone, counted under `reason`; its slot is free again."""
        entry = self.store.entries.get(group_id)
        if entry and entry.head:
            self.lost(entry.head, entry.payload, reason, entry.pushed_by)
        self.commit(events.Drop(group_id, reason))

    def take_cancels(self) -> list[tuple[str, int, bool]]:
        """What actors are to be told: (actor, group id, is the group to be handed back?). Else its lease has ended,
        because it got too old while it ran."""
        cancels, self._cancels = self._cancels, []
        return cancels

    # ---- pushes -----------------------------------------------------------------------------------------------------

    def push(self, head: Head, payload: Payload, version: int, now: float, actor: str = "") -> bool:
        """A group that needs a lease or has one → WAITING, or gone if the filter rejects it. `version`: the newest that
        is published; `actor` has made it.

        False if the group is not expected (a duplicate, dropped before, or deferred meanwhile). Taken from whoever has
        it: a lease that was given anew keeps its id, and the first push wins.
        """
        entry = self.store.entries.get(head.id)
        if entry is None or not self._expected(entry, head):
            self.duplicates += 1
            return False
        if reason := self.group_filter(head.rewards, head.lengths) if self.group_filter else "":
            self.commit(events.Push(head, version, actor))  # for whoever reads the journal: its payload is not needed
            self.commit(events.Filter(entry.id, reason))
            self.lost(head, payload, f"filtered: {reason}", actor)
            return True
        if entry.slot == NO_SLOT and not self._wins_place(entry, head):
            self.commit(events.Defer(entry.id))
            return False
        self.commit(events.Push(head, version, actor), payload, now)
        self._note_age(entry)
        return True

    def _expected(self, entry: Entry, head: Head) -> bool:
        """What was rolled out before its group was deferred is of no use after."""
        if entry.stage not in UNFINISHED:
            return False
        if not entry.was_deferred or entry.slot == NO_SLOT:
            return True
        return head.samples == entry.need and self.bound.admits(entry.slot, head.oldest)

    def _wins_place(self, entry: Entry, head: Head) -> bool:
        """A free slot that may hold these tokens, or that of the first group that is not there yet. Who was recalled
        has lost: a place that is open now is one of a later round, whose groups may be of another size."""
        lowest = self.store.lowest_open
        if entry.stage is Stage.RECALLED or lowest is None or not self.bound.admits(lowest[0], head.oldest):
            return False
        self.commit(events.Place(entry.id, lowest[1]))
        return True

    # ---- redundant groups, and the queue ----------------------------------------------------------------------------

    @property
    def deferred(self) -> int:
        """Groups in the queue, and those that will be there as soon as their actors have handed them back."""
        recalled = sum(entry.stage is Stage.RECALLED for entry in self.store.redundant.values())
        return self.store.count(Stage.DEFERRED) + recalled

    def readmit(self, entry: Entry, launch: int, need: int) -> None:
        """DEFERRED → QUEUED, in the next slot, with as many samples as its new batch asks for."""
        self.commit(events.Readmit(entry.id, launch, need))

    def recall_losers(self) -> None:
        """Recall redundant groups for which there is no place left that could hold their tokens."""
        if not self.store.redundant or self._losers_recalled_at == self.store.changes:
            return
        racing = [entry for entry in self.store.redundant.values() if entry.stage is not Stage.RECALLED]
        lowest = self.store.lowest_open if racing else None
        for entry in racing:
            if lowest is None or not self.bound.admits(lowest[0], entry.lease_version):
                self.recall(entry.id)
        self._losers_recalled_at = self.store.changes

    # ---- batches ----------------------------------------------------------------------------------------------------

    def open_batch(self, groups: int, scheduler: object) -> None:
        """The next batch has so many groups. `scheduler`: the scheduler's state, if it keeps any."""
        self.commit(events.Open(self.bound.batches.opened, groups, scheduler))

    def finished_of(self, batch: int) -> list[Entry]:
        """Groups that will be in a batch whatever comes, in the order in which it will be served `as_finished`. They
        are only known where each batch takes its own slots (`policy: in_order`)."""
        batches = self.bound.batches
        if batch >= batches.opened or batch in self.store.planned:
            return []
        slots = range(batches.first(batch), batches.first(batch + 1))
        return sorted((e for e in self.store.of(Stage.WAITING) if e.slot in slots), key=lambda e: e.pushed)

    def serve(self, batch: int, as_finished: bool = False) -> list[Entry]:
        """The groups of batch `batch`, WAITING → SERVED, or [] if they are not all there.

        The policy chooses. The bound is checked here once more, against what the actors really pushed: a group that
        breaks it is never served. What is left behind gets new slots if the order was changed. Of a group that would
        be too old for every batch from this one on, `staleness_policy` makes:

            drop         it leaves as "stale", running or not
            requeue      it is rolled out again; samples of it that began late enough are kept (if `resume`)
            mask_tokens  it is served as long as a token is young enough; the others are not trained (`oldest_allowed`)
            wait         it does not come to that: the batch before is held until the group is there, and takes it

        `as_finished`: in the order in which its groups were pushed, not the policy's. A batch that was served before a
        crash is served again with the same groups in the same order.
        """
        ids = self._planned_for(batch)
        if not ids:
            if self._undecided == (batch, self.store.changes):
                return []
            self._expire(self.bound.batch_version(batch))
            if self._replans != self.store.replans:
                self._requeue_what_is_too_new(self.bound.batch_version(batch))
            ids = self._choose(batch)
            if not self._within_bound(batch, ids):
                raise RuntimeError(f"batch {batch} would break the staleness bound of {self.bound.max_staleness}")
            if as_finished:
                ids = sorted(ids, key=lambda group_id: self.store.entries[group_id].pushed)
        if not ids:
            self._undecided = batch, self.store.changes
            return []
        self._check_on_policy(batch, ids)
        self._settle(batch, ids)
        served = [self.store.entries[group_id] for group_id in ids]
        for entry in served:
            self.store.slots.check(entry.id, entry.slot, entry.head, self.bound.batch_version(batch))
        self.commit(events.Serve(batch, list(ids), self.oldest_allowed(batch)))
        return served

    def oldest_allowed(self, batch: int) -> int:
        """Tokens of older versions are not to be trained in `batch`. 0 but for `staleness_policy: mask_tokens`."""
        if self.staleness_policy != "mask_tokens" or math.isinf(self.bound.max_staleness):
            return 0
        return max(0, self.bound.batch_version(batch) - int(self.bound.max_staleness))

    def unserve(self, batch: int) -> list[Entry]:
        """The learner can't train `batch`: its groups, which are returned, and those of batches that were served ahead
        wait again, and no batch is to be served as it was before a crash."""
        faulty = [entry for entry in self.store.of(Stage.SERVED) if entry.batch == batch]
        self.commit(events.Unserve(batch))
        self._oldest_limit = -math.inf
        return faulty

    def finish(self, batch: int) -> int:
        """The learner has trained `batch`: its groups leave. Returns how many."""
        before = self.store.trained
        self.commit(events.Finish(batch))
        return self.store.trained - before

    def branch_off(self, batch: int, why: str) -> int:
        """At a restart: the learner's settings are others (`why`) from `batch` on. What weights of later versions have
        made is rolled out anew, whatever the bound: those weights will not be made again. Returns how many groups."""
        self.commit(events.Branch(batch, why))
        version = self.bound.batch_version(batch)
        for entry in list(self.store.entries.values()):
            if entry.partial and entry.partial.newest > version:
                self.commit(events.Forget(entry.id))
        lost = [entry.id for entry in self.store.of(Stage.WAITING) if entry.newest > version]
        for group_id in lost:
            self.requeue(group_id)
        return len(lost)

    def _planned_for(self, batch: int) -> Sequence[int]:
        ids = self.store.planned.get(batch, ())
        if not ids:
            return ()
        waits = all((entry := self.store.entries.get(each)) and entry.stage is Stage.WAITING for each in ids)
        if waits and self._within_bound(batch, ids):
            return ids
        self.commit(events.Replan())  # a group has left since, or the bound is another
        return ()

    def _within_bound(self, batch: int, ids: Iterable[int]) -> bool:
        oldest = (self.store.entries[group_id].oldest_trained(self.oldest_allowed(batch)) for group_id in ids)
        ages = (self.bound.batch_version(batch) - each for each in oldest if each is not None)
        return max(ages, default=0) <= self.bound.max_staleness

    def _check_on_policy(self, batch: int, ids: Iterable[int]) -> None:
        """With a bound of 0 every token that is trained is of the weights that it trains: neither older nor newer."""
        if self.bound.max_staleness > 0:
            return
        version = self.bound.batch_version(batch)
        for entry in (self.store.entries[group_id] for group_id in ids):
            oldest = entry.oldest_trained(self.oldest_allowed(batch))
            if entry.newest > version or oldest not in (None, version):
                made = f"versions {oldest} to {entry.newest}"
                raise RuntimeError(
                    f"group {entry.id} of {made} in batch {batch} would be off-policy at version {version}"
                )

    # ---- ages -------------------------------------------------------------------------------------------------------

    def _limiting_version(self, entry: Entry) -> float:
        """The version that says how long a group can still wait."""
        masks = self.staleness_policy == "mask_tokens"
        if entry.stage is Stage.WAITING and entry.head:
            return entry.head.newest if masks else entry.head.oldest
        if entry.slot != NO_SLOT and not masks and entry.stage in LEASED:
            return entry.lease_version
        return math.inf  # its tokens are yet to come, or served, or it has no place to be trained in

    def _note_age(self, entry: Entry) -> None:
        self._oldest_limit = min(self._oldest_limit, self._limiting_version(entry))

    def _expire(self, version: int) -> None:
        """Part with what is too old to be trained at `version`. Looks only if there may be something."""
        if version - self._oldest_limit <= self.bound.max_staleness:
            return
        kept: list[float] = []
        for entry in list(self.store.entries.values()):
            limit = self._limiting_version(entry)
            if version - limit <= self.bound.max_staleness:
                kept.append(limit)
                continue
            if entry.stage in LEASED:
                if self.staleness_policy == "wait":
                    kept.append(limit)
                    continue  # its actor may have had newer weights when it began
                if self.staleness_policy == "requeue" and self.resume:
                    self.recall(entry.id)  # samples that waited for a place in the engine are younger than the lease
                    kept.append(limit)
                    continue
                self._cancels.append((entry.actor, entry.id, False))
            if self.staleness_policy == "requeue":
                self.requeue(entry.id)
            else:
                self.drop(entry.id, "stale")
        self._oldest_limit = min(kept, default=math.inf)

    def _requeue_what_is_too_new(self, version: int) -> None:
        """With a bound of 0, groups of weights that are still to come are of before a crash. They can be trained where
        all is served again as it was; but now what leads to those weights, and so the weights, will be others."""
        self._replans = self.store.replans
        if self.bound.max_staleness == 0:
            for entry in self.store.of(Stage.WAITING):
                if entry.newest > version:
                    self.requeue(entry.id)

    # ---- which groups make a batch, and the slots of the others -----------------------------------------------------

    def _choose(self, batch: int) -> Sequence[int]:
        """The policy's choice, corrected where `staleness_policy: wait` asks for it."""
        want, version, store = self.bound.batches.size(batch), self.bound.batch_version(batch), self.store
        if store.count(Stage.WAITING) < want:
            return ()
        end = self.bound.batches.first(batch + 1)
        if self._waits_for_gaps and self._has_gap(batch, end):
            return ()
        waiting = [self._view(entry, version) for entry in store.of(Stage.WAITING)]
        missing = {entry.slot for entry in store.of(*UNFINISHED) if entry.slot != NO_SLOT}
        ids = self.policy(waiting, missing | store.slots.unfilled(end), want)
        if ids and (len(ids) != want or len(set(ids)) != want or not {each.id for each in waiting}.issuperset(ids)):
            raise ValueError(f"the policy chose {list(ids)} where {want} of the waiting groups make a batch")
        if ids and self.staleness_policy == "wait":
            return rescue(ids, self._holders(), end)
        return ids

    def _has_gap(self, batch: int, end: int) -> bool:
        """Is a slot of the batch known to be missing? Then those before it are too few for a batch, as none that waits
        is of an earlier one: a policy that takes the lowest slots without gaps need not be asked."""
        lowest, first = self.store.lowest_open, self.store.first_waiting
        from_here = first is not None and first.slot >= self.bound.batches.first(batch)
        return from_here and lowest is not None and lowest[0] < end

    def _view(self, entry: Entry, version: int) -> Waiting:
        left = self.bound.max_staleness - (version - self._limiting_version(entry))
        assert entry.head is not None
        return Waiting(entry.id, entry.slot, entry.oldest, entry.pushed, left, entry.head)

    def _holders(self) -> list[Holder]:
        return [
            Holder(
                entry.id,
                entry.slot,
                self.bound.deadline(self._limiting_version(entry)),
                here=entry.stage is Stage.WAITING,
                running=entry.stage in LEASED,
                soft_deadline=self._soft_deadline(entry),
            )
            for entry in self.store.entries.values()
            if entry.stage is not Stage.SERVED and entry.slot != NO_SLOT
        ]

    def _soft_deadline(self, entry: Entry) -> float:
        """The deadline of a group that begins anew if it is missed."""
        queued = entry.stage is Stage.QUEUED and entry.partial and self.staleness_policy != "mask_tokens"
        return self.bound.deadline(entry.partial.oldest) if queued and entry.partial else math.inf

    def _settle(self, batch: int, ids: Sequence[int]) -> None:
        """The batch gets its own slots. If they were not those of its groups, all others get new ones behind it: the
        oldest tokens first, and no gaps."""
        first, end = self.bound.batches.first(batch), self.bound.batches.first(batch + 1)
        slots = dict(zip(ids, range(first, end), strict=True))
        if {self.store.entries[group_id].slot for group_id in ids} != set(slots.values()):
            slots |= place((holder for holder in self._holders() if holder.id not in slots), end)
            self.commit(events.Settle(slots, first + len(slots)))
