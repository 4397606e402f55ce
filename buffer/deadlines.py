"""The deadline of a lease: an actor that lives and gets nowhere must not hold up the others.

Actors tell with each heartbeat which of their leases have made progress (`actors.progress` says what counts). A lease
that makes none for `buffer.lease_timeout` seconds is revoked, and its group goes to another actor if there is one; who
pushes first, wins. So:

    lease ──no progress for the timeout──► revoked: QUEUED again; its actor is benched: no new leases while others work,
       │                                   until it has finished something, or for another timeout
       └──the third time for a group────► dropped as "timed out"; its slot goes to another prompt

An actor that loses MOST_IN_A_ROW leases, finishes nothing between and has nothing else that moves, hangs as a whole: it
is told to quit, and whoever started it starts it again. Held-out prompts have the same deadline; the third time they
count as failed (reward 0). While an engine says that it starts or restarts, the clocks of its leases stand still.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict

from buffer.fleet import Actor
from buffer.run_state import RunState

log = logging.getLogger(__name__)
MOST_IN_A_ROW = 3
MOST_PER_GROUP = 3
LOOKS = 8
"""Per deadline: so late, at most, by this part of it, is a lease revoked."""


class Deadlines:
    """Revokes leases that made no progress for `timeout` seconds (0: never)."""

    def __init__(self, state: RunState, timeout: float):
        self.state, self.timeout = state, timeout
        self._look_at = -math.inf

    def enforce(self, now: float) -> None:
        """To be called in each turn of the loop; looks now and then. Raises RolloutsFail."""
        if not self.timeout or now < self._look_at:
            return
        self._look_at = now + min(1.0, self.timeout / LOOKS)
        for actor in list(self.state.fleet):
            actor.moved = {group_id: actor.moved.get(group_id, now) for group_id in actor.running}
            late = [group_id for group_id, moved in actor.moved.items() if now - moved > self.timeout]
            if late:
                self._revoke(actor, sorted(late), now)
        self._take_back_heldout(now)

    def _revoke(self, actor: Actor, group_ids: list[int], now: float) -> None:
        state = self.state
        log.warning(
            "%s: no progress for %.0f s (buffer.lease_timeout) on group%s %s: others get %s",
            actor.name,
            self.timeout,
            "s" * (len(group_ids) > 1),
            ", ".join(map(str, group_ids[:8])) + (", ..." if len(group_ids) > 8 else ""),
            "them" if len(group_ids) > 1 else "it",
        )
        state.router.send(actor.peer, "cancel", {"ids": group_ids, "give_back": False})
        for group_id in group_ids:
            actor.running.discard(group_id)
            entry = state.replay.entries[group_id]
            entry.timeouts, entry.avoid = entry.timeouts + 1, actor.name
            if entry.timeouts >= MOST_PER_GROUP:
                state.replay.drop(group_id, "timed out")
                state.failures.add(group_id, "timed out", f"on {entry.timeouts} leases, the last of {actor.name}")
            else:
                state.replay.requeue(group_id)
        self._hold_against(actor, len(group_ids), now)

    def _hold_against(self, actor: Actor, leases: int, now: float) -> None:
        self.state.lease_timeouts += leases
        actor.timed_out += leases
        if actor.benched_until == math.inf:
            return  # it was told to quit
        actor.benched_until = now + self.timeout
        something_moves = any(now - actor.moved[group_id] < self.timeout / 2 for group_id in actor.running)
        if actor.timed_out >= MOST_IN_A_ROW and not something_moves:
            actor.benched_until = math.inf
            reason = f"{actor.timed_out} leases in a row made no progress for {self.timeout:.0f} s"
            log.warning("%s is told to quit: %s", actor.name, reason)
            self.state.router.send(actor.peer, "quit", {"reason": reason})

    def _take_back_heldout(self, now: float) -> None:
        late: dict[str, int] = defaultdict(int)
        for row, name in self.state.evaluation.overdue(now, self.timeout):
            late[name] += 1
            self.state.note_evaluation(self.state.evaluation.take_back(row, MOST_PER_GROUP), now)
        for name, rows in late.items():
            log.warning("%s: no progress for %.0f s on %d held-out prompts", name, self.timeout, rows)
            if actor := self.state.fleet.by_name.get(name):
                self._hold_against(actor, rows, now)
