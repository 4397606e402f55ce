"""The state of a run for people, as plain data: its levels, its actors and the waiting roles."""

import logging
import math
from dataclasses import dataclass

from buffer.checks import FailedGroups
from buffer.entries import UNFINISHED, WAITING
from buffer.evaluation import Evaluation
from buffer.gauges import Gauges
from buffer.groups import GroupManager
from buffer.outbox import Outbox
from buffer.peers import MOST_FAILED, MOST_REFUSED, Actor, Peers

log = logging.getLogger(__name__)
STALL_SECONDS = 20.0


@dataclass
class Status:
    peers: Peers
    groups: GroupManager
    evaluation: Evaluation
    outbox: Outbox
    gauges: Gauges
    failures: FailedGroups
    max_bytes: int

    def report(self) -> dict[str, object]:
        peers, now, bound = self.peers, self.peers.clock(), self.groups.store.bound.max_staleness
        return {
            **self.gauges.levels(peers, self.groups.store, now),
            "buffer/max_bytes": self.max_bytes,
            "started": peers.phase.started_at is not None,
            "trained_seconds": self.gauges.trained_seconds,
            "version": peers.weights.version,
            "steps": peers.learner.steps,
            "ledger": self.groups.store.ledger(),
            "staleness_max": self.groups.store.staleness_max,
            "staleness_bound": bound if math.isfinite(bound) else None,
            "since_step": self.gauges.since_step,  # the next three count from this step of a resume
            "staleness_mean": self.gauges.staleness_mean,
            "duplicates": self.groups.duplicates,
            "refused": peers.router.refused,
            "evaluations": self.gauges.evaluations,
            "actors": {actor.name: self._of_actor(actor, now) for actor in peers.fleet},
            "left_out": peers.left_out,
            "stopping": peers.phase.stopping,
            "waits": self.waits(),
        }

    def _of_actor(self, actor: Actor, now: float) -> dict[str, object]:
        shown = {name: getattr(actor, name) for name in ("version", "timed_out", "stats", "engine", "engine_note")}
        held = self.groups.store.entries.held_by(actor.name)
        return shown | {"running": len(held), "silent_seconds": now - actor.seen}

    def watch(self, now: float) -> None:
        """Warn if the run has made no progress for STALL_SECONDS."""
        phase = self.peers.phase
        if phase.started_at is not None and not phase.finishing and now - phase.progress_at > STALL_SECONDS:
            phase.progress_at = now
            log.warning("no progress for %.0f s: %s", STALL_SECONDS, "; ".join(self.waits()) or "nothing waits")

    def waits(self) -> list[str]:
        """The waiting roles, in words."""
        peers, entries, blocked = self.peers, self.groups.store.entries, self.outbox.blocked
        notes = [f"{actor.name}: {actor.engine_note}" for actor in peers.fleet if actor.engine_note]
        if peers.phase.finishing:
            return [] if self.evaluation.finished else ["the end waits for the last evaluation"]
        if peers.phase.started_at is None:
            to_come = peers.expected_actors - sum(actor.version >= 0 for actor in peers.fleet)
            who = ["the learner"] if peers.learner.peer is None or peers.weights.version < 0 else []
            who += [f"{to_come} actor{'s' * (to_come > 1)}"] if to_come > 0 else []
            return [f"the start waits for {' and '.join(who)}", *notes]
        lines = [f"all processes wait for the journal's disk: {blocked}"] if blocked else []
        if self.failures.count:
            lines.append(f"{self.failures.count} groups failed in a row")
        if wanted := peers.learner.wanted:
            missing, ready = entries.of(*UNFINISHED), entries.count(WAITING)
            owners = ", ".join(sorted({entry.actor or "no actor" for entry in missing}))
            running = f"{len(missing)} run on {owners}" if missing else "no group is running"
            lines.append(f"learner waits for batch {wanted.index}: {ready} groups are ready, {running}")
            if not entries and not missing and not peers.phase.stopping:
                lines.append("the scheduler starts no group")
        lines += filter(None, [self.gauges.many_dropped(peers.learner.steps)])
        lines += notes
        for actor in peers.fleet:
            if actor.refused >= MOST_REFUSED:
                lines.append(f"{actor.name} gets no leases: {actor.refused} groups of it in a row were refused")
            elif actor.failed >= MOST_FAILED:
                lines.append(
                    f"{actor.name} gets no leases while others work: {actor.failed} groups in a row failed on it"
                )
            elif not entries.held_by(actor.name) and actor.engine == "serving":
                behind = actor.version < peers.weights.version
                lines.append(f"{actor.name} waits for {'weights' if behind else 'the learner (staleness bound)'}")
        return lines
