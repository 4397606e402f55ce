"""Decides what happens to groups. Each decision becomes an event, which is journaled and then applied (`buffer.store`).

No I/O; time is passed in. All changes go through `GroupManager.commit`, and so the journal.
"""

from collections.abc import Callable, Sequence

from areal_like.wire.groups import Head
from areal_like.wire.stored import Payload
from buffer import events, policies
from buffer.batching import Ages, BatchPolicy, Chooser
from buffer.entries import LEASED, NO_SLOT, QUEUED, RECALLED, SERVED, UNFINISHED, WAITING, Entries, Entry
from buffer.injection import FixedAge
from buffer.staleness import Bound, Slots
from buffer.store import Store

Filter = Callable[..., str]
Recorder = Callable[[events.Event, Payload], Payload]
"""Records an event before it is applied. Returns the payload in the form to keep: see `Journal.append`."""
OnDrop = Callable[[int, Head | None, Payload, str, str], None]
"""Gets a group that will not be trained: its id, its push (None: there is none), the reason, the actor of the last
lease or push."""


def record_nothing(event: events.Event, payload: Payload) -> Payload:
    """The recorder of a buffer without a journal."""
    return payload


class GroupManager:
    """Decides what happens to each group.

    `batch_policy`, `group_filter`: see `buffer.policies`. `staleness_policy`: what happens to a group that would break
    the bound, see `serve`. `record` gets every event, `on_drop` every group that will not be trained."""

    def __init__(
        self,
        bound: Bound,
        batch_policy: BatchPolicy,
        staleness_policy: str = "drop",
        group_filter: Filter = policies.none,
        age: FixedAge | None = None,
    ):
        self.bound, self.staleness_policy = bound, staleness_policy
        self.group_filter, self.age = group_filter, age
        self.record: Recorder = record_nothing
        self.on_drop: OnDrop = lambda *dropped: None
        self.store = Store(bound)
        entries = self.store.entries
        self.ages = Ages(entries, bound, masks=staleness_policy == "mask_tokens")
        waits = staleness_policy == "wait"
        self.chooser = Chooser(entries, self.store.slots, bound, self.ages, batch_policy, waits)
        self.duplicates = 0
        self._filters = getattr(group_filter, "func", group_filter) is not policies.none
        self._replans = 0  # `Store.replans` at the last look
        self._cancels: list[tuple[str, int, bool]] = []

    @property
    def held(self) -> tuple[Slots, Entries]:
        return self.store.slots, self.store.entries

    def begin(self, batch: int) -> None:
        self.commit(events.Begin(batch))
        if self.age:
            self.age.begin(self.bound.batch_version(batch))

    def commit(self, event: events.Event, payload: Payload = b"", now: float = 0.0) -> None:
        """Journal the event, then apply it."""
        self.store.apply(event, self.record(event, payload), now)

    def room(self, version: int) -> float:
        """How many groups an actor with weights of `version` may start within the bound (may be inf)."""
        return self.store.slots.open_to(self.bound.deadline(version))

    def admit(  # noqa: PLR0913 (all of them are one event)
        self,
        group_id: int,
        row: int,
        launch: int,
        need: int,
        actor: str,
        version: int,
        now: float,
        redundant: bool = False,
        task: str = "",
    ) -> Entry:
        """A new group, RUNNING on an actor that holds `version`, in the next slot or, `redundant`, in none."""
        self.commit(events.Admit(group_id, row, launch, need, actor, version, redundant, task), now=now)
        entry = self.store.entries[group_id]
        self.ages.note(entry)
        return entry

    def queued_for(self, version: int, not_on: str = "") -> Entry | None:
        """The QUEUED group with the lowest slot that `version` may fill; skips those that failed on actor `not_on`."""
        entry = self.store.entries.first_queued
        if entry and not_on and entry.failed_on == not_on:
            found = [each for each in self.store.entries.of(QUEUED) if each.failed_on != not_on]
            entry = min(found, key=lambda entry: entry.slot, default=None)
        return entry if entry and self.bound.admits(entry.slot, version) else None

    def assign(self, entry: Entry, actor: str, version: int) -> None:
        """A QUEUED group runs on an actor that holds `version`."""
        self.commit(events.Lease(entry.id, actor, version))
        self.ages.note(entry)

    def recall(self, group_id: int) -> None:
        """Ask a group's actor to hand the group back (`take_cancels`)."""
        entry = self.store.entries[group_id]
        if entry.stage is not RECALLED:
            self.commit(events.Recall(group_id))
            self._cancels.append((entry.actor, group_id, True))

    def requeue(self, group_id: int) -> None:
        """A leased or WAITING group needs another lease: its rollout is void."""
        self.commit(events.Requeue(group_id))

    def drop(self, group_id: int, reason: str, detail: str = "") -> None:
        """Any stage → gone, counted under `reason`; its slot is free again. `detail` is for people."""
        entry = self.store.entries[group_id]
        why = f"{reason}: {detail}" if detail else reason
        self.on_drop(group_id, entry.head, entry.payload, why, entry.pushed_by or entry.actor)
        self.commit(events.Drop(group_id, reason))

    def take_cancels(self) -> list[tuple[str, int, bool]]:
        """Cancels to send: (actor, group id, must the actor hand the group back?). If not, the group became too old."""
        cancels, self._cancels = self._cancels, []
        return cancels

    def push(self, head: Head, payload: Payload, version: int, now: float, actor: str = "") -> bool:
        """A group that needs or has a lease → WAITING, or gone if the filter rejects it. `version`: the newest
        published one. False: not expected (a duplicate, dropped or deferred)."""
        entry = self.store.entries.get(head.id)
        if entry is None or not self._expected(entry, head):
            self.duplicates += 1
            return False
        if self._filters and (reason := self.group_filter(head.rewards, head.lengths)):
            self.commit(events.Push(head, version, actor))  # for readers of the journal; they do not need the payload
            self.commit(events.Filter(entry.id, reason))
            self.on_drop(head.id, head, payload, f"filtered: {reason}", actor)
            return True
        if entry.slot == NO_SLOT and not self._wins_place(entry, head):
            self.commit(events.Defer(entry.id))
            return False
        self.commit(events.Push(head, version, actor), payload, now)
        self.ages.note(entry)
        return True

    def _expected(self, entry: Entry, head: Head) -> bool:
        """A group that was deferred does not accept a push from before, unless it fits the new slot and size."""
        if entry.stage not in UNFINISHED:
            return False
        if not entry.was_deferred or entry.slot == NO_SLOT:
            return True
        return head.samples + head.unscored == entry.need and self.bound.admits(entry.slot, head.oldest)

    def _wins_place(self, entry: Entry, head: Head) -> bool:
        """Take a free slot that may hold these tokens, or the slot of the first unfinished group. A recalled group gets
        none: an open slot now belongs to a later round, whose groups may have another size."""
        lowest = self.store.entries.lowest_open(self.store.slots.free)
        if entry.stage is RECALLED or lowest is None or not self.bound.admits(lowest[0], head.oldest):
            return False
        self.commit(events.Place(entry.id, lowest[1]))
        return True

    def recall_losers(self) -> None:
        """Recall redundant groups if no open slot may hold their tokens."""
        racing = [entry for entry in self.store.entries.redundant.values() if entry.stage is not RECALLED]
        lowest = self.store.entries.lowest_open(self.store.slots.free) if racing else None
        for entry in racing:
            if lowest is None or not self.bound.admits(lowest[0], entry.lease_version):
                self.recall(entry.id)

    def serve(self, batch: int) -> list[Entry]:
        """The groups of batch `batch`, WAITING → SERVED, or [] if they are not all ready. The policy chooses. The bound
        is checked again, against the tokens that actors really pushed. What happens to a group that has become too old
        for this batch, and all later ones, is the `staleness_policy`:

            drop         it leaves as "stale", running or not
            requeue      it is rolled out again
            mask_tokens  it is served while any token is young enough; older tokens are not trained (`oldest_allowed`)
            wait         this never happens: an earlier batch waits until the group is ready, and takes it
        """
        ids = self._planned_for(batch)
        if not ids:
            self._expire(self.bound.batch_version(batch))
            if self._replans != self.store.replans:
                self._requeue_what_is_too_new(self.bound.batch_version(batch))
            ids = self.chooser.choose(batch)
            if ids and not self.ages.fit(batch, ids):
                raise RuntimeError(f"batch {batch} would break the staleness bound of {self.bound.max_staleness}")
        if not ids:
            return []
        self.ages.check_on_policy(batch, ids)
        if settle := self.chooser.settle(batch, ids):
            self.commit(settle)
        served = [self.store.entries[group_id] for group_id in ids]
        if self.age:
            for entry in served:
                self.age.check(entry)
        self.commit(events.Serve(batch, list(ids), self.ages.oldest_allowed(batch)))
        return served

    def unserve(self, batch: int) -> list[Entry]:
        """The learner can't train `batch`. Its groups wait again, and so do those of later batches; plans from before a
        crash are void for them. Returns the groups of `batch`."""
        faulty = [entry for entry in self.store.entries.of(SERVED) if entry.batch == batch]
        self.commit(events.Unserve(batch))
        self.ages.forget()
        return faulty

    def finish(self, batch: int) -> None:
        self.commit(events.Finish(batch))

    def _planned_for(self, batch: int) -> Sequence[int]:
        ids = self.store.planned.get(batch, ())
        if not ids:
            return ()
        waits = all((entry := self.store.entries.get(each)) and entry.stage is WAITING for each in ids)
        if waits and self.ages.fit(batch, ids):
            return ids
        self.commit(events.Replan())  # a group left since then, or the bound changed
        return ()

    def _expire(self, version: int) -> None:
        """Drop or requeue groups that are too old to train at `version`."""
        for entry in self.ages.too_old(version):
            if entry.stage in LEASED:
                if self.staleness_policy == "wait":
                    continue  # its actor may have had newer weights when the group began
                self._cancels.append((entry.actor, entry.id, False))
            if self.staleness_policy == "requeue":
                self.requeue(entry.id)
            else:
                needed = f"batch version {version} trains none from before {version - self.bound.max_staleness:g}"
                oldest = f"its oldest weights are of version {self.ages.limiting_version(entry):g}"
                self.drop(entry.id, "stale", f"{oldest}; {needed}")

    def _requeue_what_is_too_new(self, version: int) -> None:
        """With a bound of 0, requeue groups of later weights from before a crash: batches are served otherwise, so
        those weights will differ."""
        self._replans = self.store.replans
        if self.bound.max_staleness == 0:
            for entry in self.store.entries.of(WAITING):
                if entry.newest > version:
                    self.requeue(entry.id)
