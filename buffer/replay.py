"""Which groups make a batch, and who is too old for one: serving, on top of `buffer.lifecycle`. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from buffer import filters
from buffer.admission import Bound
from buffer.entries import NO_SLOT, Entry, Stage
from buffer.lifecycle import Filter, LifeCycle
from buffer.policies import WAIT_FOR_GAPS, Waiting
from buffer.slots import Holder, Slots, place, rescue

Policy = Callable[..., Sequence[int]]


class Replay(LifeCycle):
    """Picks batches; see `serve`. `policy` see `buffer.policies`, the other arguments `LifeCycle`."""

    def __init__(
        self,
        bound: Bound,
        policy: Policy | partial,
        staleness_policy: str = "drop",
        group_filter: Filter | partial = filters.none,
        resume: bool = True,
        slots: Slots | None = None,
    ):
        super().__init__(bound, staleness_policy, group_filter, resume, slots)
        self.policy = policy
        self._waits_for_gaps = getattr(policy, "func", policy) in WAIT_FOR_GAPS
        self._undecided: tuple[Any, ...] = ()  # a batch, and the facts by which there was nothing to serve
        self.planned: dict[int, list[int]] = {}  # batch → ids: served before a crash, to be served again
        self._plan_is_void = False  # since the last look

    @property
    def deferred(self) -> int:
        """Groups in the queue, and those that will be there as soon as their actors have handed them back."""
        recalled = sum(entry.recalled and not entry.moves for entry in self.spares.values())
        return len(self._stages[Stage.DEFERRED]) + recalled

    def first_deferred(self) -> int | None:
        """The group that waits longest in the queue."""
        return next(iter(self._stages[Stage.DEFERRED]), None)

    def finished_of(self, batch: int) -> list[Entry]:
        """Groups that will be in a batch whatever comes, in the order in which it will be served `as_finished`. They
        are only known where each batch takes its own slots (`policy: in_order`)."""
        batches = self.bound.batches
        if batch >= batches.opened or batch in self.planned:
            return []
        slots = range(batches.first(batch), batches.first(batch + 1))
        return sorted((e for e in self._stages[Stage.WAITING].values() if e.slot in slots), key=lambda e: e.pushed)

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
            if self._undecided == (batch, self._facts):
                return []
            self._expire(self.bound.batch_version(batch))
            if self._plan_is_void:
                self._requeue_what_is_too_new(self.bound.batch_version(batch))
            ids = self._choose(batch)
            if not self._within_bound(batch, ids):
                raise RuntimeError(f"batch {batch} would break the staleness bound of {self.bound.max_staleness}")
            if as_finished:
                ids = sorted(ids, key=lambda group_id: self.entries[group_id].pushed)
            self._undecided = () if ids else (batch, self._facts)
        if ids:
            self._check_on_policy(batch, ids)
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
        self._plan_is_void |= bool(ids or self.planned)
        self.planned.clear()  # a group has left since, or the bound is another: the order of before can't be kept
        return ()

    def _within_bound(self, batch: int, ids: Iterable[int]) -> bool:
        oldest = (self.entries[group_id].oldest_trained(self.oldest_allowed(batch)) for group_id in ids)
        ages = (self.bound.batch_version(batch) - each for each in oldest if each is not None)
        return max(ages, default=0) <= self.bound.max_staleness

    def _check_on_policy(self, batch: int, ids: Iterable[int]) -> None:
        """With a bound of 0 every token that is trained is of the weights that it trains: neither older nor newer."""
        if self.bound.max_staleness > 0:
            return
        version = self.bound.batch_version(batch)
        for entry in (self.entries[group_id] for group_id in ids):
            oldest = entry.oldest_trained(self.oldest_allowed(batch))
            if entry.newest > version or oldest not in (None, version):
                made = f"versions {oldest} to {entry.newest}"
                raise RuntimeError(
                    f"group {entry.id} of {made} in batch {batch} would be off-policy at version {version}"
                )

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

    def _requeue_what_is_too_new(self, version: int) -> None:
        """With a bound of 0, groups of weights that are still to come are of before a crash. They can be trained where
        all is served again as it was; but now what leads to those weights, and so the weights, will be others."""
        self._plan_is_void = False
        if self.bound.max_staleness == 0:
            for entry in self.in_stage(Stage.WAITING):
                if entry.newest > version:
                    self.requeue(entry.id)

    def _choose(self, batch: int) -> Sequence[int]:
        """The policy's choice, corrected where `staleness_policy: wait` asks for it."""
        want, version = self.bound.batches.size(batch), self.bound.batch_version(batch)
        if len(self._stages[Stage.WAITING]) < want:
            return ()
        end = self.bound.batches.first(batch + 1)
        if self._waits_for_gaps and self._has_gap(batch, end):
            return ()
        waiting = [self._view(entry, version) for entry in self._stages[Stage.WAITING].values()]
        missing = {entry.slot for stage in (Stage.RUNNING, Stage.QUEUED) for entry in self._stages[stage].values()}
        ids = self.policy(waiting, (missing - {NO_SLOT}) | self.slots.unfilled(end), want)
        if ids and (len(ids) != want or len(set(ids)) != want or not {each.id for each in waiting}.issuperset(ids)):
            raise ValueError(f"the policy chose {list(ids)} where {want} of the waiting groups make a batch")
        if ids and self.staleness_policy == "wait":
            return rescue(ids, self._holders(), end)
        return ids

    def _has_gap(self, batch: int, end: int) -> bool:
        """Is a slot of the batch known to be missing? Then those before it are too few for a batch, as none that waits
        is of an earlier one: a policy that takes the lowest slots without gaps need not be asked."""
        lowest, first = self.lowest_open(), self._stages.first(Stage.WAITING)
        from_here = first is not None and first.slot >= self.bound.batches.first(batch)
        return from_here and lowest is not None and lowest[0] < end

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
            if entry.stage is not Stage.SERVED and entry.slot != NO_SLOT
        ]

    def _wish(self, entry: Entry) -> float:
        """The deadline of a group that begins anew if it is missed."""
        queued = entry.stage is Stage.QUEUED and entry.partial and self.staleness_policy != "mask_tokens"
        return self.bound.horizon(entry.partial.oldest) if queued and entry.partial else math.inf

    def _settle(self, batch: int, ids: Sequence[int]) -> None:
        """The batch gets its own slots. If they were not those of its groups, all others get new ones behind it."""
        first, end = self.bound.batches.first(batch), self.bound.batches.first(batch + 1)
        in_its_slots = {self.entries[group_id].slot for group_id in ids} == set(range(first, end))
        for slot, group_id in enumerate(ids, first):
            self._stages.set_slot(self.entries[group_id], slot)
        if not in_its_slots:
            self.place_all(end, leave_out=ids)

    def place_all(self, first: int, leave_out: Iterable[int]) -> None:
        """New slots for what is not served, from `first` on: the oldest tokens first, and no gaps."""
        skip = set(leave_out)
        slots = place((holder for holder in self._holders() if holder.id not in skip), first)
        for group_id, slot in slots.items():
            self._stages.set_slot(self.entries[group_id], slot)
        self.slots = Slots(first + len(slots))

    def set_slot(self, group_id: int, slot: int) -> None:
        """To be followed by `place_all` for the others."""
        self._stages.set_slot(self.entries[group_id], slot)

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

    def unserve(self, batch: int) -> list[Entry]:
        """The learner can't train `batch`: its groups, which are returned, and those of batches that were served ahead
        wait again, and no batch is to be served as it was before a crash."""
        self.record("unserve", [batch], b"")
        entries = [entry for entry in self.in_stage(Stage.SERVED) if entry.batch >= batch]
        faulty = [entry for entry in entries if entry.batch == batch]
        for entry in entries:
            entry.batch = -1
            self.move(entry, Stage.WAITING)
        self.planned = {earlier: ids for earlier, ids in self.planned.items() if earlier < batch}
        self._plan_is_void = True
        return faulty

    def finish(self, batch: int) -> int:
        """The learner has trained `batch`: its groups leave. Returns how many."""
        self.record("finish", [batch], b"")
        done = [entry for entry in self.in_stage(Stage.SERVED) if entry.batch == batch]
        for entry in done:
            self._forget(entry.id)
        self.trained += len(done)
        self.decided.pop(batch, None)
        self.bound.batches.forget(batch + 1)
        return len(done)
