"""Which groups make a batch, and the slots of the others.

A set of groups can be trained within the bound if each can get its own slot below its deadline (`buffer.staleness`).
Earliest deadline first decides this (`place`, `rescue`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from buffer.entries import LEASED, NO_SLOT, SERVED, UNFINISHED, WAITING, Entries, Entry
from buffer.events import Settle
from buffer.policies import WAIT_FOR_GAPS, Waiting
from buffer.staleness import Bound, Slots

BatchPolicy = Callable[..., Sequence[int]]


class Ages:
    """The weights that tokens of groups are of: how long groups can still wait, and whether a batch keeps the bound.
    `masks`: old tokens of a group are not trained (`staleness_policy: mask_tokens`), so its newest one decides."""

    def __init__(self, entries: Entries, bound: Bound, masks: bool):
        self._entries, self._bound, self._masks = entries, bound, masks
        self._least = -math.inf  # at most the `limiting_version` of every group

    def limiting_version(self, entry: Entry) -> float:
        """The version that decides how long a group can still wait."""
        if entry.stage is WAITING and entry.head:
            return entry.head.newest if self._masks else entry.head.oldest
        if entry.slot != NO_SLOT and not self._masks and entry.stage in LEASED:
            return entry.lease_version
        return math.inf  # it has no tokens yet, or is served, or has no slot

    def note(self, entry: Entry) -> None:
        """A group has a lease, or was pushed."""
        if (limit := self.limiting_version(entry)) < self._least:
            self._least = limit

    def forget(self) -> None:
        """Any group may be older than noted."""
        self._least = -math.inf

    def too_old(self, version: int) -> list[Entry]:
        """The groups that can't be trained at `version`. Looks only if there may be any."""
        oldest = version - self._bound.max_staleness
        if self._least >= oldest:
            return []
        limits = list(map(self.limiting_version, self._entries.values()))
        self._least = min(limits, default=math.inf)
        return [entry for entry, limit in zip(self._entries.values(), limits, strict=True) if limit < oldest]

    def oldest_allowed(self, batch: int) -> int:
        """`batch` does not train tokens of older versions. 0 unless `staleness_policy: mask_tokens`."""
        bound = self._bound
        if not self._masks or math.isinf(bound.max_staleness):
            return 0
        return max(0, bound.batch_version(batch) - int(bound.max_staleness))

    def fit(self, batch: int, ids: Iterable[int]) -> bool:
        """Are all trained tokens of these groups within the bound of `batch`?"""
        least, allowed = self._bound.batch_version(batch) - self._bound.max_staleness, self.oldest_allowed(batch)
        oldest = [self._entries[group_id].oldest_trained(allowed) for group_id in ids]
        return all([each is None or each >= least for each in oldest])

    def check_on_policy(self, batch: int, ids: Iterable[int]) -> None:
        """With a bound of 0, every trained token must come from the weights that are trained: not older, not newer."""
        if self._bound.max_staleness > 0:
            return
        version = self._bound.batch_version(batch)
        for entry in (self._entries[group_id] for group_id in ids):
            oldest = entry.oldest_trained(self.oldest_allowed(batch))
            if entry.newest > version or oldest not in (None, version):
                made = f"versions {oldest} to {entry.newest}"
                raise RuntimeError(
                    f"group {entry.id} of {made} in batch {batch} would be off-policy at version {version}"
                )


class Chooser:
    """Applies a batch policy (`buffer.policies`). `waits`: with `staleness_policy: wait` a batch leaves no group behind
    that could not be trained later."""

    def __init__(self, entries: Entries, slots: Slots, bound: Bound, ages: Ages, policy: BatchPolicy, waits: bool):
        self._entries, self._slots, self._bound, self._ages = entries, slots, bound, ages
        self._policy, self._waits = policy, waits
        self._waits_for_gaps = getattr(policy, "func", policy) in WAIT_FOR_GAPS

    def choose(self, batch: int) -> Sequence[int]:
        """The ids of a batch's groups, or () if it must wait. Raises ValueError if the policy chose groups that do not
        make a batch."""
        bound, entries = self._bound, self._entries
        want, version, end = bound.batches.size(batch), bound.batch_version(batch), bound.batches.first(batch + 1)
        if entries.count(WAITING) < want:
            return ()
        candidates = entries.of(WAITING)
        if self._waits_for_gaps:  # it always takes the lowest slots
            if (gap := entries.lowest_open(self._slots.free)) is not None and gap[0] < end:
                return ()
            first = [entry for entry in candidates if entry.slot < end]
            candidates = first if len(first) >= want else candidates
        waiting = []
        for entry in candidates:
            left = bound.max_staleness - (version - self._ages.limiting_version(entry))
            waiting.append(Waiting(entry.id, entry.slot, entry.oldest, entry.pushed, left, entry.head))
        missing = {entry.slot for entry in entries.of(*UNFINISHED) if entry.slot != NO_SLOT}
        ids = self._policy(waiting, missing.union(self._slots.free), want)
        if ids and (len(ids) != want or len(set(ids)) != want or not {each.id for each in waiting}.issuperset(ids)):
            raise ValueError(f"the batch policy chose {list(ids)}: a batch needs {want} different groups that wait")
        return rescue(ids, self._holders(), end) if ids and self._waits else ids

    def settle(self, batch: int, ids: Sequence[int]) -> Settle | None:
        """Give the batch's groups the batch's slots. If they had others, all other groups get new slots behind the
        batch: oldest tokens first, no gaps."""
        batches, entries = self._bound.batches, self._entries
        first, end = batches.first(batch), batches.first(batch + 1)
        slots = dict(zip(ids, range(first, end), strict=True))
        if {entries[group_id].slot for group_id in ids} == set(slots.values()):
            return None
        slots |= place((holder for holder in self._holders() if holder.id not in slots), end)
        return Settle(slots, first + len(slots))

    def _holders(self) -> list[Holder]:
        return [
            Holder(
                entry.id,
                entry.slot,
                self._bound.deadline(self._ages.limiting_version(entry)),
                here=entry.stage is WAITING,
                running=entry.stage in LEASED,
            )
            for entry in self._entries.values()
            if entry.stage is not SERVED and entry.slot != NO_SLOT
        ]


class Holder(NamedTuple):
    """A group and its deadline (inf: none). `here`: it can be served now; otherwise it is `running`, or queued."""

    id: int
    slot: int
    deadline: float
    here: bool = False
    running: bool = False


def _by_deadline(holders: Iterable[Holder]) -> list[Holder]:
    return sorted(holders, key=lambda holder: (holder.deadline, holder.slot))


def place(holders: Iterable[Holder], first: int) -> dict[int, int]:
    """id → slot, from `first` on without gaps. Groups that don't fit below their deadline come last."""
    fitting: list[Holder] = []
    late: list[Holder] = []
    for holder in _by_deadline(holders):
        (fitting if first + len(fitting) < holder.deadline else late).append(holder)
    return {holder.id: slot for slot, holder in enumerate(fitting + late, first)}


def rescue(picked: Sequence[int], holders: Sequence[Holder], first: int) -> tuple[int, ...]:
    """A batch like `picked` after which all other groups still fit below their deadlines, in slots from `first` on. A
    group that would not fit replaces the picked group with the latest deadline. Returns () if that needs a group that
    still runs: the batch must wait for it. A case that no exchange can solve is left as it is."""
    known = {holder.id: holder for holder in holders}
    chosen = list(picked)
    while endangered := _too_many(chosen, holders, first):
        substitute = next((holder for holder in endangered if holder.here), None)
        latest = max(chosen, key=lambda each: (known[each].deadline, known[each].slot))
        if known[latest].deadline <= endangered[-1].deadline:
            break
        if substitute is None:
            if any(holder.running for holder in endangered):
                return ()
            break
        chosen[chosen.index(latest)] = substitute.id
    return tuple(chosen)


def _too_many(chosen: Sequence[int], holders: Iterable[Holder], first: int) -> list[Holder]:
    """The shortest prefix by deadline, without `chosen`, that has more groups than slots; [] if there is none."""
    taken = set(chosen)
    rest = _by_deadline(holder for holder in holders if holder.id not in taken)
    for place_of, holder in enumerate(rest, first):
        if place_of >= holder.deadline:
            return rest[: place_of - first + 1]
    return []
