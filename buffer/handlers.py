"""What each message changes. A message that does not fit is refused with a reason, and changes nothing."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from areal_like.groups import Head, unpack_heads
from areal_like.ring import MappedRing
from areal_like.wire import ONLY_THE_LEARNER, SAY_HELLO, Message, WireError
from buffer.checks import (
    MAX_NAME,
    RolloutsFail,
    check_give_back,
    check_hello,
    check_left_out,
    check_progress,
    check_stats,
    faults_of_push,
    read_payloads,
)
from buffer.events import LeaveOut
from buffer.fleet import MOST_REFUSED, Actor
from buffer.partials import PartialGroup
from buffer.run_state import RunState
from buffer.set_aside import set_aside
from buffer.sizing import Lengths
from buffer.status import status
from buffer.store import LEASED, Stage

log = logging.getLogger(__name__)
KEPT_DIGESTS = 10_000


class Handlers:
    """One method per kind of message: `_on_KIND(peer, actor, message)`; `actor` is None if the peer is not one."""

    def __init__(self, state: RunState):
        self.state = state

    def handle(self, peer: bytes, message: Message | WireError) -> None:
        if isinstance(message, WireError):
            return  # the router has told its sender
        handler = getattr(self, f"_on_{message.kind}", None)
        if handler is None:
            self.state.router.refuse(peer, f"the buffer does not take {message.kind!r}")
            return
        actor = self.state.fleet.by_peer.get(peer)
        if actor:
            actor.seen = time.monotonic()
        try:
            handler(peer, actor, message)
        except (WireError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            # A field inside a body that does not fit: it was looked at before anything was changed.
            self.state.router.refuse(peer, f"{message.kind}: {error}")

    def _only_the_learner(self, peer: bytes) -> None:
        if peer != self.state.learner.peer:
            raise WireError(ONLY_THE_LEARNER)

    # ---- actors -----------------------------------------------------------------------------------------------------

    def _on_hello(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        name, role, slots = message.body["name"], message.body["role"], message.body["slots"]
        check_hello(name, role, slots, actor)
        if role == "actor":
            if previous := self.state.fleet.by_name.get(name):
                self.state.lose(previous)
            actor = self.state.fleet.join(name, peer, slots, time.monotonic(), message.body["pid"])
            log.info("%s joined (pid %d)", name, actor.pid)
        elif role == "learner":
            if self.state.learner.peer not in (None, peer):
                raise WireError("there is a learner already")
            self.state.learner.peer = peer
        self.state.router.send(peer, "welcome", {})
        if role == "actor":
            self.state.tell(peer, name)

    def _on_heartbeat(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        if actor is None:
            self.state.router.refuse(peer, f"unknown actor: {SAY_HELLO}")
        else:
            body, now = message.body, time.monotonic()
            check_progress(body["progress"], body["heldout"])
            self.state.fleet.note_stats(actor, check_stats(body["stats"]))
            self.state.verifiers.see(actor.name, actor.stats)
            actor.note_moved(body["progress"] if actor.engine == "serving" else actor.running, now)
            self.state.evaluation.note_moved(actor.name, body["heldout"], now)
            if actor.engine != "serving":
                self.state.evaluation.restart_clocks(now, actor.name)
            if actor.version < self.state.weights.version:
                self.state.tell(peer, actor.name)

    def _on_share(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        """An actor offers memory for its payloads: it is of use if it is on this host."""
        if actor is None or actor.ring:
            raise WireError("not an actor that has just said hello")
        body, readable = message.body, self.state.router.endpoint.startswith("ipc://")
        if readable:
            try:
                actor.ring = MappedRing(self.state.fleet.next_ring(), body["pid"], body["fd"], body["token"])
            except OSError as error:
                log.info("%s: payloads come by the socket, its memory can't be read: %s", actor.name, error)
        self.state.router.send(peer, "shared", {"readable": actor.ring is not None})

    def _on_relay(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        """An actor offers to hand weights on to others."""
        if actor is None:
            raise WireError("not an actor that has said hello")
        endpoint, key = message.body["endpoint"], message.body["key"]
        if not endpoint.startswith(("inproc://", "ipc://", "tcp://")) or max(len(endpoint), len(key)) > MAX_NAME:
            raise WireError("that is no endpoint, or no key")
        self.state.relays.join(actor.name, endpoint, key)

    def _on_credit(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        if actor:
            actor.ended = message.body["ended"]

    def _on_applied(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        version, digest = message.body["version"], message.body["digest"]
        if self.state.weights.digests.get(version) != digest:
            raise WireError(f"no version {version} with digest {digest[:40]} was published")
        if actor:
            actor.version = max(actor.version, version)

    def _on_push(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        if actor is None:
            raise WireError(f"only an actor pushes: {SAY_HELLO}")
        try:
            heads = unpack_heads(message.body)
            payloads = read_payloads(heads, message.payloads, actor.ring)
        except WireError as error:
            names = message.body["groups"]
            named = [name[0] for name in names if isinstance(name, list) and name and isinstance(name[0], int)]
            self._refuse_groups(actor, dict.fromkeys(named, error))
            raise
        state, now = self.state, time.monotonic()
        faults = faults_of_push(heads, payloads, state.store.entries, state.weights.digests, state.learner.vocab_size)
        foreign = [head.id for head in heads if not self.state.may_push(actor, head.id)]
        here = [pair for pair in zip(heads, payloads, strict=True) if pair[1] is not None]
        pushed = [(head, payload) for head, payload in here if head.id not in (*foreign, *faults)]
        try:
            taken = [self._take(head, payload, now, actor.name) for head, payload in pushed]
        except Exception as error:  # a filter of the user's, say; what the actor has sent is in order
            raise RuntimeError(f"taking a pushed group in failed: {type(error).__name__}: {error}") from error
        if any(taken):
            self.state.progress_at = now
            self.state.failures.end()
            actor.refused = 0
        if accepted := [head.id for head in heads if head.id not in faults]:
            state.outbox.put(peer, "pushed", {"ids": accepted})  # or what is foreign comes again
        if foreign:
            state.router.refuse(peer, f"push: {actor.name} has had no lease of group {foreign[0]}")
        if faults:
            self._refuse_groups(actor, faults)
            raise next(iter(faults.values()))

    def _refuse_groups(self, actor: Actor, faults: dict[int, WireError]) -> None:
        """Groups that can't be accepted end their leases: others roll them out again. A group that is refused again and
        again is dropped; raises RolloutsFail where no actor is left whose groups are accepted."""
        state = self.state
        for group_id in sorted(faults.keys() & actor.running):
            entry = state.store.entries[group_id]
            actor.running.discard(group_id)
            actor.refused += not entry.refused or entry.avoid != actor.name  # the same group again tells nothing new
            entry.refused, entry.avoid = entry.refused + 1, actor.name
            state.gauges.refused[getattr(faults[group_id], "column", "form")] += 1
            if state.hedges.leave_to_other(entry, actor.name):
                continue
            if entry.refused < MOST_REFUSED:
                state.replay.requeue(group_id)
            else:
                state.replay.drop(group_id, "malformed")
        state.outbox.put(actor.peer, "pushed", {"ids": sorted(faults)})  # or they would come again
        if actor.refused >= MOST_REFUSED:
            log.warning("%s gets no more leases: %d groups of it in a row were refused", actor.name, actor.refused)
        if all(each.refused >= MOST_REFUSED for each in state.fleet):
            last = list(faults.values())[-1]
            raise RolloutsFail(f"{MOST_REFUSED} groups in a row of every actor were refused; the last: {last}")

    def _take(self, head: Head, payload: Any, now: float, maker: str) -> bool:
        state = self.state
        entry = state.store.entries.get(head.id)
        cut = entry.cut if entry else ()
        owner = state.fleet.by_name.get(entry.actor) if entry else None
        new = state.replay.push(head, payload, state.weights.version, now, maker)
        state.end_hedges(maker)
        if owner and entry and entry.stage not in LEASED:  # else the push came late: the lease of now goes on
            state.end_lease(owner, head.id, told=owner.name != maker)
        if new and entry:
            if finisher := state.fleet.by_name.get(maker):
                finisher.has_finished()
            state.gauges.tokens_pushed += head.tokens
            if state.scheduler.sizing.looks:
                state.gauges.see(
                    Lengths((*head.lengths, *cut), (False,) * head.samples + (True,) * len(cut), closed=True)
                )
            state.largest_payload = max(state.largest_payload, head.size)
        return new

    def _on_left_out(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        group_id, cut, redrawn = message.body["id"], message.body["cut"], message.body["redrawn"]
        entry = self.state.store.entries.get(group_id)
        if entry is None or actor is None or not self.state.hedges.holds(entry, actor.name):
            return
        check_left_out(cut, redrawn, entry)
        self.state.replay.commit(LeaveOut(group_id, tuple(cut), redrawn))

    def _on_failed(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        group_id, reason = message.body["id"], message.body["reason"]
        entry = self.state.store.entries.get(group_id)
        if entry is None or actor is None or not self.state.hedges.holds(entry, actor.name):
            return
        actor.running.discard(group_id)
        if self.state.hedges.leave_to_other(entry, actor.name):
            return
        self.state.replay.drop(group_id, reason[:60])
        self.state.failures.add(group_id, reason, message.body["detail"])

    def _on_give_back(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        """An actor will not finish these groups: because it leaves, or because it was asked to. Their leases end, even
        if what it hands back can't be accepted."""
        if actor is None:
            return
        state, metas, left = self.state, message.body["partials"], {}
        ids = {each for each in message.body["ids"] if isinstance(each, int)} & actor.running
        try:
            check_give_back(
                metas, message.payloads, state.store.entries, state.weights.digests, state.learner.vocab_size
            )
            left = {meta["id"]: PartialGroup(meta, part) for meta, part in zip(metas, message.payloads, strict=True)}
        finally:
            for group_id in sorted(ids):
                actor.running.discard(group_id)
                entry = self.state.store.entries[group_id]
                if self.state.hedges.leave_to_other(entry, actor.name):
                    continue  # the other has begun without what comes back here
                cut = group_id in left and entry.stage is Stage.RECALLED
                if cut and self.state.scheduler.sizing.looks:
                    self.state.gauges.see(left[group_id].lengths.of(entry.launch))
                self.state.replay.hand_back(group_id, left.get(group_id))
            if message.body["leaving"]:
                log.info("%s leaves; %d of its %d groups had begun", actor.name, len(left), len(ids))
                self.state.lose(actor)

    def _on_evaluated(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        body = message.body
        if actor is None or not math.isfinite(body["reward"]):
            raise WireError("no actor, or no reward")
        result = self.state.evaluation.record(
            actor.name, body["id"], body["reward"], body["length"], body["oldest"], body["newest"]
        )
        self.state.note_evaluation(result, time.monotonic())

    def _on_lost(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        """A supervisor saw a process die: nobody need wait for its silence. A pid of 0: whoever has that name."""
        name, pid = message.body["name"], message.body["pid"]
        dead = self.state.fleet.by_name.get(name)
        if dead and pid in (0, dead.pid):
            log.warning("%s %s: its %d leases go to others", dead.name, message.body["how"], len(dead.running))
            self.state.lose(dead)
        if message.body["for_good"] and self.state.expected_actors > 1:
            self.state.expected_actors -= 1
            self.state.left_out[name] = message.body["how"]
            log.warning("%s is left out: the run goes on without it", name)

    # ---- the learner ------------------------------------------------------------------------------------------------

    def _on_model(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        """What the learner's model takes: groups with other tokens are refused."""
        self._only_the_learner(peer)
        self.state.learner.vocab_size = message.body["vocab_size"]

    def _on_published(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        self._only_the_learner(peer)
        manifest = message.body["manifest"]
        version, digest = int(manifest["version"]), str(manifest["digest"])
        if self.state.weights.published and version <= self.state.weights.published["version"]:
            return  # said before
        self.state.weights.published, self.state.weights.digests[version] = {**manifest, "version": version}, digest
        self.state.weights.digests.pop(version - KEPT_DIGESTS, None)
        self.state.announce()

    def _on_want(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        self._only_the_learner(peer)
        index, version = message.body["index"], message.body["version"]
        expected = self.state.replay.bound.batch_version(index)
        if version != expected:
            raise WireError(f"batch {index} is trained at version {expected}, not {version}")
        if index < self.state.learner.steps:
            raise WireError(f"batch {index} is trained already")
        self.state.learner.wanted = message
        if self.state.learner.parts is not None:
            self.state.learner.parts = 0

    def _on_stream(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        self._only_the_learner(peer)
        self.state.learner.parts = 0

    def _on_want_share(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        index = message.body["index"]
        if index < self.state.learner.steps:
            raise WireError(f"batch {index} is trained already")
        self.state.shares.want(peer, index, message.body["rank"])

    def _on_trained(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        self._only_the_learner(peer)
        self._trained_before(message.body["index"] + 1)

    def _trained_before(self, steps: int) -> None:
        """Batches before `steps` are trained: also those of which word was lost on its way; none is counted twice."""
        served = [entry.batch for entry in self.state.store.of(Stage.SERVED)]
        if steps > max(self.state.learner.steps, max(served, default=-1) + 1):
            raise WireError(f"batch {steps - 1} was not served")
        for index in range(self.state.learner.steps, steps):
            self.state.replay.finish(index)
        self.state.learner.steps = max(self.state.learner.steps, steps)
        self.state.shares.trained(self.state.learner.steps)

    def _on_untrainable(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        """The learner asks for other groups in place of those that it can't train."""
        self._only_the_learner(peer)
        index = message.body["index"]
        if index != self.state.learner.steps:
            raise WireError(f"batch {index} is not the next one to be trained")
        set_aside(self.state, index, message.body["reason"])
        self.state.outbox.put(peer, "set_aside", {"index": index, "redo": self.state.learner.redo})

    def _on_checkpointed(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        self._only_the_learner(peer)
        if (
            message.body["step"] == self.state.learner.steps
        ):  # an older one lacks batches that the journal then would not have
            self.state.outbox.rotate(self.state.store.snapshot, self.state.store.payloads())

    def _on_finish(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        """No more batches: what is still active is dropped, the last evaluation runs, then the report goes out."""
        self._only_the_learner(peer)
        self._trained_before(message.body["steps"])
        self.state.finishing, self.state.learner.wanted, self.state.reported = True, None, False
        self.state.announce()
        self.state.gauges.trained_seconds = self.state.age(time.monotonic())
        for each in self.state.fleet:
            self.state.router.send(each.peer, "cancel", {"ids": sorted(each.running), "give_back": False})
            each.running.clear()
        self.state.hedges.pairs.clear()
        for group_id in list(self.state.store.entries):
            self.state.replay.drop(group_id, "end of run")
        self.state.evaluation.finish_with(self.state.weights.version)

    def _on_stop(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        """A person asks the run to end."""
        self.state.stopping = "drain" if message.body["drain"] else "now"
        log.info("asked to %s", "train what is here and make the last batch whole" if message.body["drain"] else "stop")
        self.state.router.send(peer, "report", {"report": status(self.state)})

    def _on_status(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        self.state.router.send(peer, "report", {"report": status(self.state)})
