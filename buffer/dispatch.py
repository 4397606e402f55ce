"""What the buffer hands out: leases to actors, within the bound and their free slots, and batches to the learner."""

import heapq
import logging
import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

from areal_like.types import Lease
from areal_like.wire import messages
from areal_like.wire.frames import Frame
from areal_like.wire.groups import pack_heads
from areal_like.wire.stored import load
from buffer.entries import DEFERRED, LEASED, QUEUED, UNFINISHED, Entry
from buffer.evaluation import Evaluation
from buffer.events import Open, Readmit
from buffer.gauges import Gauges
from buffer.groups import GroupManager
from buffer.outbox import Outbox
from buffer.peers import Actor, Peers, not_benched
from buffer.prompts import PromptCursor
from buffer.schedulers import GroupPlan, Round, Scheduler, View
from buffer.segment_file import JournalError
from buffer.shares import Shares
from buffer.sizing import check_sizes

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Dispatcher:
    """Decides who gets what. `max_bytes`: with more payload bytes, only groups of the learner's next batch are started.
    `last_batch`: the data ends with it (None: the end is not known). `shares`: batches sent and not trained yet."""

    peers: Peers
    groups: GroupManager
    outbox: Outbox
    scheduler: Scheduler
    prompts: PromptCursor
    evaluation: Evaluation
    max_bytes: int
    last_batch: int | None = None
    shares: Shares = field(default_factory=Shares)
    gauges: Gauges = field(default_factory=Gauges)
    largest_payload: int = 0  # bytes of one group, so far
    samples_per_batch: int = field(init=False)

    def __post_init__(self) -> None:
        self.samples_per_batch = check_sizes(self.scheduler.sizing, self.groups.bound.groups_per_batch)

    def announce(self) -> None:
        """Announce the newest weights to all actors, unless they must keep the present weights (`injection`)."""
        weights = self.peers.weights
        new = weights.published if weights.published is not weights.manifest else None
        age = None if self.peers.phase.finishing else self.groups.age
        if new and (age is None or age.may_announce(new.version, *self.groups.held)):
            self.peers.announce()

    def evaluate(self, now: float) -> None:
        """Hand out held-out prompts, if a round is under way."""
        peers, evaluation = self.peers, self.evaluation
        if peers.phase.started_at is None:
            return
        version, steps = peers.weights.version, peers.learner.steps
        if not peers.phase.finishing and version == self.groups.bound.batch_version(steps):
            evaluation.start_if_due(version, steps)
        evaluation.tick()
        if not evaluation.has_rows:
            return
        actors = not_benched(list(peers.fleet), now)
        to_come = evaluation.without_share([actor.name for actor in actors])
        for actor in actors:
            leases = evaluation.leases(actor.name, actor.version, to_come, now)
            if leases:
                to_come -= 1
                self.peers.router.send(actor.peer, messages.Lease(leases))

    def admit(self, now: float) -> None:
        """Hand out leases, each to the actor with the fewest groups; among equals, to the one that joined first."""
        if self.peers.phase.started_at is None or self.peers.phase.finishing or self.outbox.blocked:
            return
        store = self.groups.store
        running, queued = store.entries.count(*LEASED), store.entries.count(QUEUED)
        view = self._view(self.peers.weights.version, running)
        to_start = view.room + queued + self.scheduler.wants_redundant(view)
        if not to_start:
            return
        at_work = self.peers.fleet.at_work(now)
        # With more than its share the first actor with new weights would take a whole round, and the others would idle.
        share = (to_start + running) / max(1, len(at_work))
        waiting = [actor for actor in at_work if actor.version >= 0]
        able = sorted((len(store.entries.held_by(actor.name)), at, actor) for at, actor in enumerate(waiting))  # a heap
        granted_to: dict[str, list[Lease]] = defaultdict(list)
        while able and able[0][0] < share:
            holds, at, actor = able[0]
            entry = self._next_queued(actor, at_work)
            sequences = entry.launch if entry else self.scheduler.launch
            if actor.free_slots < sequences and holds:  # an idle actor may always get a group
                heapq.heappop(able)
                continue
            granted = self._grant(actor, entry, running, now)
            if granted:
                running += 1
                heapq.heapreplace(able, (holds + 1, at, actor))
                granted_to[actor.name].append(granted)
            elif self.groups.queued_for(actor.version):
                heapq.heappop(able)  # what failed on this one may go to others
            else:
                able = sorted(each for each in able if each[2].version != actor.version)
        for name, leases in granted_to.items():
            self.peers.router.send(self.peers.fleet.by_name[name].peer, messages.Lease(leases))

    def _next_queued(self, actor: Actor, at_work: list[Actor]) -> Entry | None:
        """The queued group for this actor. One that failed on it goes to another actor with weights as new, if any."""
        entry = self.groups.queued_for(actor.version)
        if entry is None or entry.failed_on != actor.name:
            return entry
        if not any(each.version >= actor.version for each in at_work if each is not actor):
            return entry
        return self.groups.queued_for(actor.version, not_on=actor.name)

    def _grant(self, actor: Actor, entry: Entry | None, running: int, now: float) -> Lease | None:
        """A lease of a queued group or, without one, of what the scheduler starts. None: this actor gets nothing."""
        if entry:
            self.groups.assign(entry, actor.name, actor.version)
        elif plan := self._next_plan(actor, running):
            entry = self._start(actor, plan, now)
        else:
            return None
        entry.moved_at, entry.tokens, entry.grew_at = now, 0, now
        actor.leased += entry.launch
        return Lease(entry.id, entry.row, "train", entry.launch, entry.need)

    def _next_plan(self, actor: Actor, running: int) -> GroupPlan | None:
        store, wanted = self.groups.store, self.peers.learner.wanted
        if self.peers.phase.stopping and not self._completes_a_batch():
            return None
        to_come = store.bytes + self.largest_payload * running  # each running group as large as the largest so far
        if to_come > self.max_bytes:
            needed = self.groups.bound.batches.first(wanted.index + 1) if wanted else 0
            if store.slots.next >= needed:  # slots below are never stopped: they free memory
                if self.groups.age:
                    self.groups.age.refuse_waiting(self.max_bytes)
                return None
        return self.scheduler.admit(self._view(actor.version, running))

    def _start(self, actor: Actor, plan: GroupPlan, now: float) -> Entry:
        """Start the group of a plan: returns it, RUNNING. A slot that was free may belong to an earlier batch, whose
        groups have another size."""
        need = self.samples_per_batch // self.groups.bound.batches.size_at(self.groups.store.slots.next)
        if need != plan.need and not plan.redundant:
            plan = GroupPlan(math.ceil(need * plan.launch / plan.need), need, plan.deferred)
        entry = self.groups.store.entries.first_deferred if plan.deferred else None
        if entry is not None:
            self.groups.commit(Readmit(entry.id, plan.launch, plan.need))
            self.groups.assign(entry, actor.name, actor.version)
            return entry
        group_id, row, task = self.prompts.next()
        return self.groups.admit(
            group_id, row, plan.launch, plan.need, actor.name, actor.version, now, plan.redundant, task
        )

    def _open_batch(self) -> None:
        """Fix the size of a batch's groups before the first of them starts."""
        groups, scheduler = self.groups, self.scheduler
        batches = groups.bound.batches
        batch = batches.of(groups.store.slots.next)
        while batches.opened <= batch and scheduler.ready_to_open(batches.opened, self.peers.learner.steps):
            if batches.opened < batch:  # slots of these are in use, but no event opened them: all have the usual size
                groups.commit(Open(batches.opened, batches.usual, None))
                continue
            seen, self.gauges.seen = self.gauges.seen, []
            queue = groups.store.entries.in_queue
            size = scheduler.open_batch(self.samples_per_batch, queue, seen, self._least_groups(batch))
            groups.commit(Open(batch, size, scheduler.state_dict()))
            self.gauges.decisions[batch] |= scheduler.metrics() | {"rounds/deferred": queue}

    def _least_groups(self, batch: int) -> int:
        """The smallest size of this batch that trains all deferred and redundant groups before the data ends."""
        if self.last_batch is None or self.last_batch <= batch:
            return 0
        waiting = self.groups.store.entries.count(DEFERRED) + len(self.groups.store.entries.redundant)
        return math.ceil(waiting / (self.last_batch - batch))

    def _view(self, version: int, running: int) -> View:
        """What the scheduler may know, for an actor with `version`. First opens the batch of the next slot, if
        allowed."""
        store, room = self.groups.store, self.groups.room(version)
        if room > 0 and store.slots.next >= self.groups.bound.batches.end:
            self._open_batch()
            room = self.groups.room(version)
        in_flight = running + store.entries.count(QUEUED)  # started, and the next to get a lease
        return View(room, in_flight, store.entries.count(DEFERRED), partial(self._round, version))

    def _round(self, version: int) -> Round:
        store, batches, steps = self.groups.store, self.groups.bound.batches, self.peers.learner.steps
        to_come = math.inf
        lasts = [last for last in (self.last_batch, self._drains_to()) if last is not None]
        if lasts:
            to_come = (min(lasts) - steps) * batches.size(steps) - len(store.entries)
        return Round(
            left=batches.first(steps + 1) - store.slots.used,
            unfinished=store.entries.count(*UNFINISHED) - len(store.entries.redundant),
            redundant=len(store.entries.redundant),
            fresh=to_come,
            current=version >= self.groups.bound.batch_version(steps),
        )

    def revoke(self) -> None:
        """Send the cancels of groups that became too old or lost their place in the round."""
        for name, group_id, hand_back in self.groups.take_cancels():
            if actor := self.peers.fleet.by_name.get(name):
                self.peers.router.send(actor.peer, messages.Cancel([group_id], hand_back))

    def _drains_to(self) -> int | None:
        """If the run drains: the first batch that will not be trained. Active groups fill those before it; new ones
        complete the last."""
        if self.peers.phase.stopping != "drain":
            return None
        batches = self.groups.bound.batches
        return batches.of(batches.first(self.peers.learner.steps) + len(self.groups.store.entries) - 1) + 1

    def _completes_a_batch(self) -> bool:
        """If the run drains: does the next slot belong to a batch that is still trained?"""
        last = self._drains_to()
        return last is not None and self.groups.store.slots.next < self.groups.bound.batches.first(last)

    def serve(self, now: float) -> None:
        """Send the batch that the learner waits for, once it is complete, and ranks their shares."""
        self.shares.answer(self.outbox.put)
        learner, stopping = self.peers.learner, self.peers.phase.stopping
        if learner.wanted is None or learner.peer is None:
            return
        index, version = learner.wanted.index, learner.wanted.version
        if index in self.shares.served:  # the message with the batch was lost
            learner.wanted = None
            self.outbox.put(learner.peer, *self.shares.served[index].share(0))
            return
        if stopping == "now" and index % self.groups.bound.interval == 0:
            self.stop_learner(learner.peer)
            return
        age = self.groups.age
        entries = self.groups.serve(index) if age is None or age.may_train(index, *self.groups.held) else []
        self.revoke()
        frames = self._frames(entries, index)
        if not frames:
            last = self._drains_to()  # a batch beyond it does not come, nor any if no group is in progress
            if last is not None:
                under_way = self.groups.store.entries.count(*UNFINISHED) > 0 or self._completes_a_batch()
                if index >= last or not under_way:
                    self.stop_learner(learner.peer)
            elif learner.wanted.until is not None and self.peers.age(now) >= learner.wanted.until:
                self.stop_learner(learner.peer, late=True)
            return
        learner.wanted = None
        self.peers.phase.progress_at = now
        self.gauges.measure_rates(now)
        allowed = self.groups.ages.oldest_allowed(index)
        info = self.gauges.levels(self.peers, self.groups.store, now)
        info |= self.gauges.batch_info(entries, version, allowed, now) | {"buffer/max_bytes": self.max_bytes}
        info |= self.gauges.decisions.pop(index, {})
        heads, actors = [entry.head for entry in entries if entry.head], [entry.pushed_by for entry in entries]
        batch = messages.Batch(index, version, allowed, actors, pack_heads(heads), info, learner.redo)
        self.outbox.put(learner.peer, *self.shares.put(batch, heads, frames).share(0))
        self.shares.answer(self.outbox.put)

    def _frames(self, entries: list[Entry], batch: int) -> list[Frame]:
        """The payloads of a SERVED batch. Empty if the journal has lost one: the others wait for another rollout."""
        frames, lost = [], []
        for entry in entries:
            try:
                frames.append(load(entry.payload))
            except JournalError as error:
                log.error("group %d will be rolled out again: %s", entry.id, error)
                lost.append(entry.id)
        if lost:
            self.groups.unserve(batch)
        for group_id in lost:
            self.groups.requeue(group_id)
        return [] if lost else frames

    def stop_learner(self, peer: bytes, late: bool = False) -> None:
        self.peers.learner.wanted = None  # if this message is lost, the learner asks again
        self.peers.router.send(peer, messages.Stop(late or self.peers.phase.stopping == "drain", late))
