"""The buffer's loop: messages in, decisions, messages out. One thread, no locks; the journal's own waits for the disk.

Waiting roles:
  an actor    waits for leases        → unblocked by `Dispatcher.admit`: a trained batch, a new version, a free slot
  the learner waits for a batch       → unblocked by `Dispatcher.serve`: a push
  all         wait for the start      → unblocked by `Presence.start`: enough actors hold version 0

A message that does not fit the run is refused (WireError) before it has changed anything. Other errors end the process;
a resume restores its state from the journal.
"""

import logging
import math
import sys

from areal_like.run.process import EXIT_STOPPED
from areal_like.wire import messages
from areal_like.wire.frames import ONLY_THE_LEARNER, SAY_HELLO, Frame, Payloads, Received, WireError
from areal_like.wire.groups import Head, unpack_heads
from areal_like.wire.messages import Message
from areal_like.wire.stored import Payload
from buffer import checks
from buffer.deadlines import Deadlines
from buffer.dispatch import Dispatcher
from buffer.entries import LEASED, SERVED, WAITING, Entry
from buffer.evaluation import AnswerResult
from buffer.events import LeaveOut
from buffer.kept_samples import KeptSamples
from buffer.peers import Actor
from buffer.presence import Presence
from buffer.sizing import GroupLengths
from buffer.status import Status

log = logging.getLogger(__name__)
KEPT_DIGESTS = 10_000
LONGEST_REASON = 60
MESSAGES_PER_TURN = 1000
"""A peer that floods the buffer can't stop its decisions."""
STOP_SECONDS = 5.0
"""The learner confirms a stop at a checkpoint within this time, or the run ends without one."""
COMMIT_POLL_SECONDS = 0.001
"""How often to check whether a commit is on disk, if no message comes."""
_FROM_ACTORS = messages.SENDS["actor"] - {messages.Sync, messages.Fetch}
_AFTER_LEAVING = (messages.Credit, messages.Applied, messages.LeftOut, messages.Failed, messages.HandBack)
"""An actor that has left may still send these; they change nothing."""


class Server:
    """Drives one run. Times are in seconds."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        heartbeat_timeout: float,
        ready_timeout: float = math.inf,
        lease_timeout: float = 0.0,
        verifiers: checks.Unverified | None = None,
        limits: checks.AnswerLimits | None = None,
        heldout_limits: checks.AnswerLimits | None = None,
        samples: KeptSamples | None = None,
    ):
        self.dispatcher = dispatcher
        self.peers, self.groups, self.evaluation = dispatcher.peers, dispatcher.groups, dispatcher.evaluation
        self.store, self.outbox, self.gauges = self.groups.store, dispatcher.outbox, dispatcher.gauges
        self.router, self.fleet = self.peers.router, self.peers.fleet
        self.learner, self.weights, self.phase = self.peers.learner, self.peers.weights, self.peers.phase
        self.verifiers, self.samples = verifiers or checks.Unverified(), samples or KeptSamples()
        self.limits, self.heldout_limits = limits or checks.AnswerLimits(), heldout_limits or checks.AnswerLimits()
        self.deadlines = Deadlines(self.peers, self.groups, self.evaluation, self.gauges, lease_timeout)
        self.failures = self.deadlines.failures
        decided = self.peers, self.groups, self.evaluation, self.outbox, self.gauges
        self.presence = Presence(*decided, heartbeat_timeout, ready_timeout)
        self.status = Status(*decided, self.failures, dispatcher.max_bytes)
        self.gauges.since_step = self.learner.steps
        self.groups.on_drop = self._on_drop
        self.gauges.measures_lengths = len(dispatcher.scheduler.sizing.sizes) > 1
        self.phase.progress_at = self.peers.clock()

    def run(self) -> None:
        """Run until SIGTERM raises SystemExit."""
        while True:
            self.step(timeout=0.2)

    def step(self, timeout: float) -> None:
        self._receive(timeout)  # first: decisions need all that is known
        now = self.peers.clock()
        if now > self.phase.stop_by:
            sys.exit(EXIT_STOPPED)
        self.presence.remove_silent(now)  # before leases: their groups go to others in the same turn
        self.deadlines.enforce(now)
        if self.phase.started_at is None and self.presence.start(now, self.status.waits):
            self.gauges.rate_at = now
        self.dispatcher.announce()  # before leases: with `injection` it opens the slots of the new version
        self.groups.recall_losers()  # after pushes, which take places; before the scheduler counts the queue
        self.dispatcher.revoke()  # before leases: an actor must see a lease end before it gets the group again
        self.dispatcher.evaluate(now)  # before training leases, which would take all the room
        self.dispatcher.admit(now)  # before serving: the batch that the learner waits for may exceed the memory limit
        self.dispatcher.serve(now)  # revokes groups that are too old at once: the next turn may come late
        if self.phase.finishing and not self.phase.reported and self.evaluation.finished and self.learner.peer:
            self.phase.reported = True
            self.router.send(self.learner.peer, messages.Report(self.status.report()))
        self.outbox.flush()  # last: write decisions; send messages whose records are on disk
        self.status.watch(now)

    def _receive(self, timeout: float) -> None:
        if self.outbox.journal and self.outbox.journal.busy:  # `flush` must come soon
            timeout = min(timeout, COMMIT_POLL_SECONDS)
        for _ in range(MESSAGES_PER_TURN):
            received = self.router.receive(timeout)
            if received is None:
                break
            self.handle(*received)
            timeout = 0

    def handle(self, peer: bytes, received: Received | WireError) -> None:
        if isinstance(received, WireError):
            return  # the router has refused it
        message, payloads, owner = received
        actor = self.fleet.by_peer.get(peer)
        if actor:
            actor.seen = self.peers.clock()
        try:
            if self._from_anybody(peer, message, owner):
                return
            if type(message) in messages.SENDS["learner"]:
                self._from_learner(peer, message)
            elif actor is None:
                if not isinstance(message, _AFTER_LEAVING):
                    raise WireError(f"unknown actor: {SAY_HELLO}")
            elif type(message) in _FROM_ACTORS:
                self._from_actor(actor, message, payloads)
            else:
                raise WireError("the buffer does not take this")
        except WireError as error:
            self.router.refuse(peer, f"{message.kind()}: {error}")

    def _from_anybody(self, peer: bytes, message: Message, owner: str) -> bool:
        """Returns False if only the learner or an actor may send the message."""
        match message:
            case messages.Hello():
                self.presence.hello(peer, message, owner)
            case messages.Lost():
                self.presence.lost(message, owner)
            case messages.WantShare(index, rank):
                if index < self.learner.steps:
                    raise WireError(f"batch {index} is trained already")
                self.dispatcher.shares.want(peer, index, rank)
            case messages.Stop() if peer == self.learner.peer:  # it writes a checkpoint
                self.phase.stop_by = math.inf
            case messages.Stop() | messages.Status():
                if isinstance(message, messages.Stop):  # a user asks the run to end
                    self._stop(message)
                self.router.send(peer, messages.Report(self.status.report()))
            case _:
                return False
        return True

    def _stop(self, message: messages.Stop) -> None:
        log.info("asked to end the run: %s", message)
        before, self.phase.stopping = self.phase.stopping, "drain" if message.drain else "now"
        if not message.drain and before != "now":
            self.phase.stop_by = self.peers.clock() + STOP_SECONDS
            if self.learner.peer:
                self.router.send(self.learner.peer, message)

    def _from_actor(self, actor: Actor, message: Message, payloads: Payloads) -> None:
        held = self.store.entries.held_by(actor.name)
        if isinstance(message, messages.LeftOut | messages.Failed) and message.id not in held:
            return  # of a lease that has ended
        match message:
            case messages.Push():
                self._on_push(actor, message, payloads)
            case messages.Credit(ended):
                checks.check_credit(ended, actor.leased)
                actor.ended = ended
            case messages.Heartbeat():
                self._on_heartbeat(actor, message)
            case messages.Applied(version, digest):
                checks.check_published(version, digest, self.weights.digests)
                actor.version = max(actor.version, version)
            case messages.Evaluated():
                self._on_evaluated(actor, message, payloads)
            case messages.LeftOut(group_id, cut, redrawn):
                checks.check_left_out(cut, redrawn, held[group_id], self.limits)
                self.groups.commit(LeaveOut(group_id, tuple(cut), redrawn))
            case messages.Failed():
                self._on_failed(actor, message)
            case messages.HandBack():
                self.presence.hand_back(actor, message, self.limits)
            case messages.Relay(endpoint, key):
                self.fleet.tree.join(actor.name, endpoint, key)

    def _on_failed(self, actor: Actor, message: messages.Failed) -> None:
        if self.presence.passes_on(actor, message):
            return
        self.groups.drop(message.id, message.reason[:LONGEST_REASON], message.detail)
        if all(each.failed for each in self.fleet):  # else others roll out groups, or may
            self.failures.add(message.id, message.reason, message.detail)

    def _on_heartbeat(self, actor: Actor, message: messages.Heartbeat) -> None:
        now = self.peers.clock()
        checks.check_stats(message.stats)
        self.fleet.totals.note(actor.name, actor.peer, message.stats)
        actor.stats = message.stats
        self.verifiers.see(actor.name, actor.stats, self.fleet.by_name)
        held, serves = self.store.entries.held_by(actor.name), actor.engine == "serving"
        for group_id, tokens in message.progress.items() if serves else dict.fromkeys(held, 0).items():
            entry = held.get(group_id)
            if entry and self.limits.allows_progress(entry.row, entry.launch, tokens):
                self.deadlines.note_moved(entry, tokens, now)
        self.deadlines.note_heldout(actor.name, message.heldout, self.heldout_limits, now)
        if not serves:
            self.evaluation.restart_clocks(now, actor.name)
        if actor.version < self.weights.version:
            self.peers.announce_to(actor)

    def _on_push(self, actor: Actor, message: messages.Push, payloads: Payloads) -> None:
        try:
            heads, faults = self.read_push(message, payloads)
        except WireError as error:
            self.presence.refuse(actor, dict.fromkeys((group_id for group_id, _, _ in message.table.groups), error))
            raise
        now, taken, foreign = self.peers.clock(), False, []
        for head, payload in zip(heads, payloads, strict=True):
            entry = self.store.entries.get(head.id)
            if head.id in faults:
                continue
            if _may_push(actor, entry):
                taken |= self._take(head, payload, now, actor, entry)
            else:
                foreign.append(head.id)
        if taken:
            self.phase.progress_at = now
            self.failures.count = 0
            actor.refused = actor.failed = 0
        if accepted := [head.id for head in heads if head.id not in faults]:
            self.outbox.put(actor.peer, messages.Pushed(accepted))  # foreign groups too, or they would come again
        if foreign:
            self.router.refuse(actor.peer, f"push: {actor.name} has had no lease of group {foreign[0]}")
        if faults:
            self.presence.refuse(actor, faults)
            raise next(iter(faults.values()))

    def read_push(self, message: messages.Push, payloads: Payloads) -> tuple[list[Head], dict[int, WireError]]:
        """The groups of a push, and the faulty ones with their faults. Raises WireError if its table can't be read. (A
        simulator has another.)"""
        heads = unpack_heads(message.table)
        if len(heads) != len(payloads):
            raise WireError(f"push: {len(payloads)} payloads for {len(heads)} groups")
        known = self.weights.digests, self.learner.model, self.limits
        return heads, checks.faults_of_push(heads, payloads, self.store.entries, *known)

    def _take(self, head: Head, payload: Frame, now: float, actor: Actor, entry: Entry | None) -> bool:
        """Take a group in. Returns False if it is not expected (`GroupManager.push`)."""
        holder = entry.actor if entry and entry.stage in LEASED else ""
        new = self.groups.push(head, payload, self.weights.version, now, actor.name)
        if holder not in ("", actor.name) and head.id not in self.store.entries.held_by(holder):
            self.router.send(self.fleet.by_name[holder].peer, messages.Cancel([head.id], hand_back=False))
        if new:
            actor.timed_out, actor.benched_until = 0, -math.inf  # forget its revoked leases
            self.gauges.tokens_pushed += head.tokens
            if self.gauges.measures_lengths:
                self.gauges.seen.append(GroupLengths(tuple(head.lengths), (False,) * head.samples))
            self.dispatcher.largest_payload = max(self.dispatcher.largest_payload, head.size)
        return new

    def _on_evaluated(self, actor: Actor, message: messages.Evaluated, payloads: Payloads) -> None:
        number = self.evaluation.row_of(actor.name, message.id)
        limits = checks.AnswerLimits() if number is None else self.heldout_limits
        answer = checks.checked_answer(message, payloads, self.learner.model, self.weights.digests, limits, number or 0)
        if number is None:
            return
        found = AnswerResult(message.reward, message.length, message.oldest, message.newest)
        result = self.evaluation.record(actor.name, message.id, found)
        self.gauges.note_evaluation(result, self.peers.age(self.peers.clock()))
        self.samples.heldout(self._now, self.evaluation.places[number], answer, actor.name)

    def _from_learner(self, peer: bytes, message: Message) -> None:
        if peer != self.learner.peer:
            raise WireError(ONLY_THE_LEARNER)
        match message:
            case messages.Model():
                self.learner.model = message
            case messages.Published(manifest):
                self._on_published(manifest)
            case messages.Want(index, version):
                if version != (expected := self.groups.bound.batch_version(index)):
                    raise WireError(f"batch {index} is trained at version {expected}, not {version}")
                if index < self.learner.steps:
                    raise WireError(f"batch {index} is trained already")
                self.learner.wanted = message
            case messages.Trained(index):
                self._trained_before(index + 1)
            case messages.Untrainable(index, reason):
                self._set_aside(index, reason)
                self.outbox.put(peer, messages.SetAside(index, self.learner.redo))
            case messages.Checkpointed(step):
                if self.learner.checkpointed < step <= self.learner.steps:
                    self.learner.checkpointed = step
                    self.outbox.rotate(self.store.snapshot, self.store.payloads(), late=step < self.learner.steps)
            case messages.EndRun():
                self._on_end_run(message.steps)

    def _on_published(self, manifest: messages.Manifest) -> None:
        weights = self.weights
        if weights.published is None or manifest.version > weights.published.version:
            weights.published, weights.digests[manifest.version] = manifest, manifest.digest
            weights.digests.pop(manifest.version - KEPT_DIGESTS, None)
            self.dispatcher.announce()

    def _trained_before(self, steps: int) -> None:
        """Batches before `steps` are trained, even if a message about one was lost."""
        served = [entry.batch for entry in self.store.entries.of(SERVED)]
        if steps > max(self.learner.steps, max(served, default=-1) + 1):
            raise WireError(f"batch {steps - 1} was not served")
        for index in range(self.learner.steps, steps):
            self.groups.finish(index)
        self.learner.steps = max(self.learner.steps, steps)
        self.dispatcher.shares.trained(self.learner.steps)

    def _set_aside(self, index: int, reason: str) -> None:
        """Drop the groups of batch `index`, which can't be trained; those of later batches wait again, in order. A
        repeated call changes nothing."""
        if index != self.learner.steps:
            raise WireError(f"batch {index} is not the next one to be trained")
        voided = self.dispatcher.shares.void(index)
        if not voided:
            return
        self.gauges.reported -= sum(len(each.batch.info["evaluations"]) for each in voided)  # report them again
        faulty = self.groups.unserve(index)
        self.learner.redo += 1
        log.warning("batch %d is set aside, its %d groups are replaced: %s", index, len(faulty), reason)
        for entry in faulty:
            self.groups.drop(entry.id, "untrainable", reason)
        self.learner.wanted = None

    def _on_end_run(self, steps: int) -> None:
        """No more batches: drop all active groups, run the last evaluation, then send the report."""
        self._trained_before(steps)
        self.phase.finishing, self.learner.wanted, self.phase.reported = True, None, False
        self.dispatcher.announce()  # a version held back, too: the last evaluation is of it
        self.gauges.trained_seconds = self.peers.age(self.peers.clock())
        for actor in self.fleet:
            held = sorted(self.store.entries.held_by(actor.name))
            self.router.send(actor.peer, messages.Cancel(held, hand_back=False))
        for group_id in list(self.store.entries):
            self.groups.drop(group_id, "end of run")
        self.evaluation.finish_with(self.weights.version)

    @property
    def _now(self) -> tuple[int, int]:
        """(train steps made, newest version announced to actors)."""
        return self.learner.steps, self.weights.version

    def _on_drop(self, group: int, head: Head | None, payload: Payload, why: str, actor: str) -> None:
        if why != "end of run":
            self.samples.dropped(self._now, group, head, payload, why, actor)
            if head:
                self.gauges.note_dropped(why, self.learner.steps, self.groups.bound.groups_per_batch)


def _may_push(actor: Actor, entry: Entry | None) -> bool:
    """Has this actor ever had a lease of the group (the first push wins), or does a push not change it?"""
    return entry is None or actor.name in entry.holders or entry.stage in (WAITING, SERVED)
