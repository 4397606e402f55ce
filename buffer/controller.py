"""The buffer's loop: messages in, decisions by the scheduler and the policy, messages out. One thread, no locks
(the journal has a thread that waits for the disk).

Who waits for what:
  an actor    waits for leases        → unblocked by `_admit`: a trained batch, an applied version, a freed slot
  the learner waits for a batch       → unblocked by `_serve`: a push
  everybody   waits for the start     → unblocked by `_start`: enough actors hold version 0
All state that matters is in `Replay` (groups, ledger), `Fleet` (actors), `Evaluation` and `PromptCursor`.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from typing import Any

from areal_like.bus import BusError, Router, routing_id
from areal_like.types import Lease
from areal_like.wire import Message, WireError
from buffer.checks import Failures, check_push
from buffer.evaluation import Evaluation
from buffer.fleet import Actor, Fleet
from buffer.gauges import Gauges
from buffer.journal import Journal
from buffer.outbox import Outbox
from buffer.prompts import PromptCursor
from buffer.recovery import snapshot
from buffer.replay import Entry, Replay, Stage
from buffer.schedulers import Scheduler, View
from buffer.status import levels, status, waits

log = logging.getLogger(__name__)
STALL_SECONDS = 20.0
KEPT_DIGESTS = 10_000


class Controller:
    """Drives one run. `expected_actors` must hold version 0 within `ready_timeout` seconds, before the first lease;
    over `max_bytes` of payloads nothing is started but what the learner's next batch lacks; an actor not heard of for
    `heartbeat_timeout` seconds loses its leases. `journal`, which `replay` records to, is committed before anything
    that rests on it is said. `steps` batches were trained before (a resumed run)."""

    def __init__(  # noqa: PLR0913 - main puts the parts of a run together here
        self,
        router: Router,
        replay: Replay,
        scheduler: Scheduler,
        prompts: PromptCursor,
        evaluation: Evaluation,
        *,
        expected_actors: int,
        max_bytes: int,
        heartbeat_timeout: float,
        ready_timeout: float = math.inf,
        journal: Journal | None = None,
        steps: int = 0,
    ):
        self.router, self.replay, self.scheduler = router, replay, scheduler
        self.prompts, self.evaluation, self.fleet = prompts, evaluation, Fleet()
        self.expected_actors, self.max_bytes, self.heartbeat_timeout = expected_actors, max_bytes, heartbeat_timeout
        self.gauges = Gauges()
        self.version = -1
        self.steps = steps
        self.outbox, self.ready_timeout = Outbox(router, journal), ready_timeout
        self.manifest: dict[str, Any] | None = None
        self.started_at: float | None = None
        self.learner: bytes | None = None
        self.wanted: Message | None = None
        self.finishing = False
        self.reported = False
        self.digests: dict[int, str] = {}
        self.failures = Failures(most=4 * replay.bound.groups_per_batch)
        self._born = self._last_turn = self._progress_at = time.monotonic()

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the process is told to end (SIGTERM raises SystemExit)."""
        while True:
            self.step(timeout=0.2)

    def step(self, timeout: float) -> None:
        """Handle what has arrived, then decide. Separate from `run` so that tests drive it."""
        received = self.router.receive(self.outbox.patience(timeout))
        while received:
            peer, message = received
            self._handle(peer, message)
            received = self.router.receive(0)
        now = time.monotonic()
        if now - self._last_turn > self.heartbeat_timeout / 2:
            self.fleet.forgive(now)  # it was this process that stood still: what it did not hear proves nothing
        self._last_turn = now
        for actor in self.fleet.silent(now, self.heartbeat_timeout):
            log.warning("%s: no sign of life for %.0f s, its leases go to others", actor.name, self.heartbeat_timeout)
            self._lose(actor)
        self._start(now)
        self._evaluate()
        self._admit(now)
        self._serve(now)
        self._report_when_finished()
        self.outbox.flush()
        self._watch(now)

    def _handle(self, peer: bytes, message: Message | WireError) -> None:
        if isinstance(message, WireError):
            log.warning("refused a message of %r: %s", peer, message)
            self.router.send(peer, "refused", {"reason": str(message)})
            return
        handler = getattr(self, f"_on_{message.kind}", None)
        if handler is None:
            self.router.send(peer, "refused", {"reason": f"the buffer does not take {message.kind!r}"})
            return
        actor = self.fleet.by_peer.get(peer)
        if actor:
            actor.seen = time.monotonic()
        try:
            handler(peer, actor, message)
        except (WireError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            # A field inside a body that does not fit: it was looked at before anything was changed.
            self.router.refused += 1
            log.warning("refused %s of %r: %r", message.kind, peer, error)
            self.router.send(peer, "refused", {"reason": f"{message.kind}: {error}"})

    def _only_the_learner(self, peer: bytes) -> None:
        if peer != self.learner:
            raise WireError("only the learner may say this")

    # ---- actors -----------------------------------------------------------------------------------------------------

    def _on_hello(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        name, role = message.body["name"], message.body["role"]
        if role == "actor":
            if previous := self.fleet.by_name.get(name):
                self._lose(previous)
            self.fleet.join(name, peer, message.body["slots"], time.monotonic())
            log.info("%s joined (pid %d)", name, message.body["pid"])
        elif role == "learner":
            if self.learner not in (None, peer):
                raise WireError("there is a learner already")
            self.learner = peer
        self.router.send(peer, "welcome", {})
        if role == "actor" and self.manifest:
            self.router.send(peer, "announce", {"manifest": self.manifest})

    def _on_heartbeat(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        if actor is None:
            self.router.send(peer, "refused", {"reason": "unknown actor: say hello"})
        else:
            actor.stats = {key: float(value) for key, value in message.body["stats"].items()}
            if self.manifest and actor.version < self.version:
                self.router.send(peer, "announce", {"manifest": self.manifest})

    def _on_credit(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        if actor:
            actor.ended = message.body["ended"]

    def _on_applied(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        version, digest = message.body["version"], message.body["digest"]
        if self.manifest and version == self.manifest["version"] and digest != self.manifest["digest"]:
            raise WireError(f"version {version} applied with digest {digest}, published {self.manifest['digest']}")
        if actor:
            actor.version = max(actor.version, version)

    def _on_push(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        metas = message.body["groups"]
        try:
            check_push(metas, message.payloads, self.replay.entries, self.digests)
        except WireError:
            self._give_up(actor, metas)
            raise
        now = time.monotonic()
        for meta, payload in zip(metas, message.payloads, strict=True):
            self._take(meta, payload, now)
        self.outbox.put(peer, "pushed", {"ids": [meta["id"] for meta in metas]})

    def _give_up(self, actor: Actor | None, metas: list[Any]) -> None:
        """A push that can't be accepted ends the leases that it names, or the batch would wait for them for ever."""
        ids = {meta["id"] for meta in metas if isinstance(meta, dict) and isinstance(meta.get("id"), int)}
        for group_id in ids & (actor.running if actor else set()):
            self._release(group_id, self.replay.entries[group_id])
            self.replay.drop(group_id, "malformed")
        if actor:
            self.outbox.put(actor.peer, "pushed", {"ids": sorted(ids)})  # or it would come again

    def _take(self, meta: dict[str, Any], payload: Any, now: float) -> None:
        entry = self.replay.entries.get(meta["id"])
        self._release(meta["id"], entry)
        if self.replay.push(meta, payload, self.version, now):
            self.gauges.pushed(meta)
            self._progress_at = now
            self.failures.end()

    def _on_failed(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        group_id, reason = message.body["id"], message.body["reason"]
        entry = self.replay.entries.get(group_id)
        if entry is None or entry.stage is not Stage.RUNNING or actor is None or entry.actor != actor.name:
            return
        self._release(group_id, entry)
        self.replay.drop(group_id, reason[:60])
        self.failures.add(group_id, reason, message.body["detail"])

    def _on_evaluated(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        body = message.body
        result = self.evaluation.record(body["id"], body["reward"], body["length"], body["oldest"], body["newest"])
        if result:
            result["seconds"] = self.age(time.monotonic())
            log.info("held-out reward %.3f at version %d", result["reward"], result["version"])
            self.gauges.evaluations.append(result)

    def _release(self, group_id: int, entry: Entry | None) -> None:
        owner = self.fleet.by_name.get(entry.actor) if entry else None
        if owner:
            owner.running.discard(group_id)

    def _lose(self, actor: Actor) -> None:
        """Its leases go to others; the groups keep their slots."""
        for group_id in actor.running:
            self.replay.requeue(group_id)
        self.evaluation.lost(actor.name)
        self.fleet.leave(actor)

    def _on_lost(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        """The supervisor saw a process die: nobody need wait for its silence."""
        dead = self.fleet.by_peer.get(routing_id(message.body["name"], message.body["pid"]))
        if dead:
            log.warning("%s %s: its %d leases go to others", dead.name, message.body["how"], len(dead.running))
            self._lose(dead)

    # ---- the learner ------------------------------------------------------------------------------------------------

    def _on_published(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        self._only_the_learner(peer)
        manifest = message.body["manifest"]
        version, digest = int(manifest["version"]), str(manifest["digest"])
        self.manifest, self.version, self.digests[version] = manifest, version, digest
        self.digests.pop(version - KEPT_DIGESTS, None)
        for each in self.fleet:
            self.router.send(each.peer, "announce", {"manifest": manifest})

    def _on_want(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        self._only_the_learner(peer)
        index, version = message.body["index"], message.body["version"]
        expected = self.replay.bound.batch_version(index)
        if version != expected:
            raise WireError(f"batch {index} is trained at version {expected}, not {version}")
        self.wanted = message

    def _on_trained(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        self._only_the_learner(peer)
        self.replay.finish(message.body["index"])
        self.steps = message.body["index"] + 1

    def _on_checkpointed(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        self._only_the_learner(peer)
        self.outbox.rotate(snapshot(self.replay))

    def _on_finish(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        """No more batches: what is still active is dropped, the last evaluation runs, then the report goes out."""
        self._only_the_learner(peer)
        self.finishing, self.wanted = True, None
        self.gauges.trained_seconds = self.age(time.monotonic())
        for each in self.fleet:
            self.router.send(each.peer, "cancel", {"ids": sorted(each.running)})
            each.running.clear()
        for group_id in list(self.replay.entries):
            self.replay.drop(group_id, "end of run")
        self.evaluation.finish_with(self.version)

    def _on_status(self, peer: bytes, actor: Actor | None, message: Message) -> None:
        self.router.send(peer, "report", {"report": status(self)})

    # ---- decisions --------------------------------------------------------------------------------------------------

    def _start(self, now: float) -> None:
        if self.started_at is not None:
            return
        if now - self._born > self.ready_timeout:
            raise BusError(f"after {self.ready_timeout:.0f} s (launcher.ready_timeout) {'; '.join(waits(self))}")
        ready = sum(actor.version >= 0 for actor in self.fleet)
        if self.learner and ready >= self.expected_actors:
            self.started_at = self._progress_at = now
            self.gauges.start(now)
            log.info("all %d actors hold version 0: first lease", ready)

    def age(self, now: float) -> float:
        """Seconds since the first lease."""
        return 0.0 if self.started_at is None else now - self.started_at

    def _evaluate(self) -> None:
        if self.started_at is None:
            return
        if not self.finishing and self.version == self.replay.bound.batch_version(self.steps):
            self.evaluation.start_if_due(self.version, self.steps)
        self.evaluation.tick()
        if not self.evaluation.has_rows:
            return
        to_come = self.evaluation.without_share([actor.name for actor in self.fleet])
        for actor in self.fleet:
            leases = self.evaluation.leases(actor.name, actor.version, to_come)
            if leases:
                to_come -= 1
                self._send_leases(actor, leases)

    def _admit(self, now: float) -> None:
        """Hand out leases, one at a time to the actor that holds the fewest."""
        if self.started_at is None or self.finishing or self.outbox.blocked:
            return
        queued = len(self.replay.in_stage(Stage.QUEUED))
        to_start = self.replay.room(self.version) + queued
        if not to_start:
            return
        planned: dict[str, list[Lease]] = {}
        share, running = self.fleet.fair_share(to_start), sum(len(actor.running) for actor in self.fleet)
        candidates = [
            (len(actor.running), place, actor) for place, actor in enumerate(self.fleet) if actor.version >= 0
        ]
        heapq.heapify(candidates)
        while candidates:
            held, place, actor = candidates[0]
            lease = None
            if held < share and actor.takes(self.scheduler.sizing.largest):
                lease = self._next_lease(actor, running, queued > 0, now)
            if lease is None:
                heapq.heappop(candidates)
                continue
            heapq.heapreplace(candidates, (held + 1, place, actor))
            running += 1
            actor.running.add(lease.group_id)
            actor.leased += lease.launch
            planned.setdefault(actor.name, []).append(lease)
        for name, leases in planned.items():
            self._send_leases(self.fleet.by_name[name], leases)

    def _next_lease(self, actor: Actor, running: int, any_queued: bool, now: float) -> Lease | None:
        entry = self.replay.queued_for(actor.version) if any_queued else None
        if entry:
            self.replay.assign(entry, actor.name, actor.version)
        elif self.replay.bytes > self.max_bytes and self.replay.slots.next >= self._slots_wanted():
            return None  # never the slots that the learner waits for: its batch is what frees memory
        else:
            view = View(
                room=int(self.replay.room(actor.version) > 0),
                running=running,
                admitted_slots=self.replay.admitted_slots,
                trained_batches=self.steps,
                groups_per_batch=self.replay.bound.groups_per_batch,
            )
            plans = self.scheduler.admit(view)
            if not plans:
                return None
            group_id, row = self.prompts.next()
            plan, held = plans[0], actor.version
            entry = self.replay.admit(group_id, row, plan.launch, plan.need, actor.name, held, now)
        return Lease(entry.id, entry.row, "train", entry.launch, entry.need)

    def _slots_wanted(self) -> int:
        """The slots below this belong to the batch that the learner waits for, or to earlier ones."""
        return (self.wanted.body["index"] + 1) * self.replay.bound.groups_per_batch if self.wanted else 0

    def _send_leases(self, actor: Actor, leases: list[Lease]) -> None:
        rows = [[e.group_id, e.row, e.split, e.launch, e.need, e.temperature] for e in leases]
        self.router.send(actor.peer, "lease", {"leases": rows})

    def _serve(self, now: float) -> None:
        if self.wanted is None or self.learner is None:
            return
        index, version = self.wanted.body["index"], self.wanted.body["version"]
        entries = self.replay.serve(index)
        self._revoke()
        if not entries:
            return
        self.wanted = None
        self._progress_at = now
        self.gauges.measure_rates(self.fleet, now)
        allowed = self.replay.oldest_allowed(index)
        info = self.gauges.batch_info(entries, version, allowed, now) | levels(self, now)
        metas = [entry.meta for entry in entries]
        body = {"index": index, "version": version, "oldest_allowed": allowed, "groups": metas, "info": info}
        self.outbox.put(self.learner, "batch", body, [entry.payload for entry in entries])

    def _revoke(self) -> None:
        """Actors need not finish what got too old while it ran."""
        for name, group_id in self.replay.take_revoked():
            if actor := self.fleet.by_name.get(name):
                actor.running.discard(group_id)
                self.router.send(actor.peer, "cancel", {"ids": [group_id]})

    def _report_when_finished(self) -> None:
        if self.finishing and not self.reported and self.evaluation.finished and self.learner:
            self.reported = True
            self.router.send(self.learner, "report", {"report": status(self)})

    def _watch(self, now: float) -> None:
        if self.started_at is not None and not self.finishing and now - self._progress_at > STALL_SECONDS:
            self._progress_at = now
            log.warning("nothing moved for %.0f s: %s", STALL_SECONDS, "; ".join(waits(self)) or "nobody waits")
