"""The deadline of a lease: an actor that is alive but makes no progress must not hold up the others.

Each heartbeat names the leases of the actor that made progress (`actors.progress` defines it). The buffer revokes a
lease without progress for `buffer.lease_timeout` seconds: its group goes to another actor or, the third time, is
dropped as "timed out". The first push wins. The actor is benched: it gets no leases while others work, until it has
finished something, or for another timeout. Held-out prompts have the same deadline; the third time they count as failed
(reward 0). While an engine starts or restarts, the clocks of its leases stop.

The buffer makes an actor quit that seems to hang, and its launcher starts it again. There are two signs. It loses
MOST_IN_A_ROW leases, finishes nothing between, and no other one moves. Or it took no new weights for a timeout after
its bench.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping

from areal_like.wire import messages
from buffer.checks import AnswerLimits, FailedGroups
from buffer.entries import Entry
from buffer.evaluation import Evaluation
from buffer.gauges import Gauges
from buffer.groups import GroupManager
from buffer.peers import Actor, Peers

log = logging.getLogger(__name__)
MOST_IN_A_ROW = 3
MOST_PER_GROUP = 3
MOST_SILENT = 10
CHECKS = 8
"""Checks per deadline: a lease is revoked at most 1/CHECKS of the deadline late."""


class Deadlines:
    """Revokes leases without progress for `timeout` seconds (0: never). `failures`: groups that failed in a row."""

    def __init__(self, peers: Peers, groups: GroupManager, evaluation: Evaluation, gauges: Gauges, timeout: float):
        self.peers, self.groups, self.evaluation, self.gauges = peers, groups, evaluation, gauges
        self.timeout = timeout
        self.failures = FailedGroups(most=4 * groups.bound.groups_per_batch)
        self._next_check = -math.inf

    def note_moved(self, entry: Entry, tokens: int, now: float) -> None:
        """An actor reports progress with a lease. Without more tokens it counts for MOST_SILENT deadlines only."""
        if tokens > entry.tokens:
            entry.tokens, entry.grew_at = tokens, now
        if now - entry.grew_at < MOST_SILENT * self.timeout:
            entry.moved_at = now

    def note_heldout(self, actor: str, tokens: Mapping[int, int], limits: AnswerLimits, now: float) -> None:
        """Like `note_moved`, of held-out leases. All of an actor's wait at once: any tokens or answer are enough."""
        found: dict[int, int] = {}
        for lease_id, count in tokens.items():
            row = self.evaluation.row_of(actor, lease_id)
            if row is not None and limits.allows_progress(row, self.evaluation.places[row].of.samples, count):
                found[row] = count
        self.evaluation.note_moved(actor, found, now, MOST_SILENT * self.timeout)

    def enforce(self, now: float) -> None:
        """Revoke late leases. Call it in each turn of the loop; most calls check nothing. Raises RolloutsFail."""
        if not self.timeout or now < self._next_check:
            return
        self._next_check = now + min(1.0, self.timeout / CHECKS)
        for actor in list(self.peers.fleet):
            held = self.groups.store.entries.held_by(actor.name).values()
            late = [entry for entry in held if now - entry.moved_at > self.timeout]
            if late:
                self._revoke(actor, sorted(late, key=lambda entry: entry.id), now)
            self._check_benched(actor, now)
        self._take_back_heldout(now)

    def _revoke(self, actor: Actor, late: list[Entry], now: float) -> None:
        ids = [entry.id for entry in late]
        log.warning(
            "%s: no progress for %.0f s (buffer.lease_timeout) on %d groups (%s): others get them",
            *(actor.name, self.timeout, len(ids), ", ".join(map(str, ids[:8])) + ", ..." * (len(ids) > 8)),
        )
        self.peers.router.send(actor.peer, messages.Cancel(ids, hand_back=False))
        for entry in late:
            entry.timeouts, entry.failed_on = entry.timeouts + 1, actor.name
            if entry.timeouts < MOST_PER_GROUP:
                self.groups.requeue(entry.id)
                continue
            detail = f"on {entry.timeouts} leases, the last of {actor.name}"
            self.groups.drop(entry.id, "timed out", detail)
            self.failures.add(entry.id, "timed out", detail)
        self._penalize(actor, len(late), now)

    def _penalize(self, actor: Actor, leases: int, now: float) -> None:
        """Bench an actor that lost leases to the deadline. If it hangs, make it quit."""
        self.gauges.lease_timeouts += leases
        actor.timed_out += leases
        if actor.benched_until == math.inf:
            return  # the actor already got `Quit`
        actor.benched_until, actor.benched_at = now + self.timeout, actor.version
        held = self.groups.store.entries.held_by(actor.name).values()
        something_moves = any(now - entry.moved_at < self.timeout / 2 for entry in held)
        if actor.timed_out >= MOST_IN_A_ROW and not something_moves:
            self._send_quit(actor, f"{actor.timed_out} leases in a row made no progress in time")

    def _send_quit(self, actor: Actor, reason: str) -> None:
        actor.benched_until = math.inf
        log.warning("%s must quit: %s (buffer.lease_timeout)", actor.name, reason)
        self.peers.router.send(actor.peer, messages.Quit(f"{reason} (buffer.lease_timeout)"))

    def _check_benched(self, actor: Actor, now: float) -> None:
        """Make a benched actor quit if it takes no new weights: without them it gets no lease to time out on."""
        is_behind = actor.timed_out > 0 and actor.version == actor.benched_at < self.peers.weights.version
        actor.behind_since = min(actor.behind_since, now) if is_behind else math.inf
        is_back, is_idle = actor.benched_until <= now, not self.groups.store.entries.held_by(actor.name)
        if is_back and is_idle and now - actor.behind_since > self.timeout:
            self._send_quit(actor, f"it has taken no new weights since {actor.timed_out} of its leases hung")

    def _take_back_heldout(self, now: float) -> None:
        late: Counter[str] = Counter()
        for row, name in self.evaluation.overdue(now, self.timeout):
            late[name] += 1
            self.gauges.note_evaluation(self.evaluation.take_back(row, MOST_PER_GROUP), self.peers.age(now))
        for name, rows in late.items():
            log.warning("%s: no progress for %.0f s on %d held-out prompts", name, self.timeout, rows)
            if actor := self.peers.fleet.by_name.get(name):
                self._penalize(actor, rows, now)
