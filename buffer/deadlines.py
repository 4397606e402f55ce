"""The deadline of a lease: an actor that is alive but makes no progress must not hold up the others.

Each heartbeat says which leases of the actor made progress (`actors.progress` says what counts). The buffer revokes a
lease without progress for `buffer.lease_timeout` seconds and gives its group to another actor, if there is one. The
first push wins.

    lease ──no progress for the timeout──► revoked: QUEUED again; its actor is benched: no new leases while others work,
       │                                   until it has finished something, or for another timeout
       ├──at half the timeout, if another actor is idle: the group is leased to that one as well (`buffer.fleet`)
       └──the third time for a group────► dropped as "timed out"; its slot goes to another prompt

The buffer tells an actor to quit if the whole actor seems to hang, and its launcher starts it again. There are two
signs. It loses MOST_IN_A_ROW leases (to the deadline or a hedge), finishes nothing between, and none of its other
leases moves. Or its bench is over, and it has not taken new weights for another timeout.

Held-out prompts have the same deadline; the third time they count as failed (reward 0). While an engine says that it
starts or restarts, the clocks of its leases stop.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict

from areal_like.types import Lease
from areal_like.wire import messages
from buffer.actor import Actor
from buffer.dispatch import send_leases
from buffer.fleet import is_idle_for, may_be_hedged
from buffer.run_state import RunState
from buffer.store import Entry

log = logging.getLogger(__name__)
MOST_IN_A_ROW = 3
MOST_PER_GROUP = 3
HEDGE_AT = 0.5
"""After this part of the deadline without progress, an idle actor also gets the group (`buffer.fleet`)."""
LOOKS = 8
"""Checks per deadline: a lease is revoked at most 1/LOOKS of the deadline late."""


class Deadlines:
    """Revokes leases that made no progress for `timeout` seconds (0: never)."""

    def __init__(self, state: RunState, timeout: float):
        self.state, self.timeout = state, timeout
        self._look_at = -math.inf
        self._slow: list[Entry] = []

    def enforce(self, now: float) -> None:
        """Revoke late leases. Call it in each turn of the loop; most calls check nothing. Raises RolloutsFail."""
        if not self.timeout or now < self._look_at:
            return
        self._look_at = now + min(1.0, self.timeout / LOOKS)
        self._slow = []
        overtaken, self.state.hedges.overtaken = self.state.hedges.overtaken, []
        for name, leases in Counter(overtaken).items():
            if hung := self.state.fleet.by_name.get(name):
                self._hold_against(hung, leases, now)
        for actor in list(self.state.fleet):
            late = [group_id for group_id, moved in actor.running.items() if now - moved > self.timeout]
            if late:
                self._revoke(actor, sorted(late), now)
            self._look_after_benched(actor, now)
            half = [each for each, moved in actor.running.items() if now - moved > self.timeout * HEDGE_AT]
            self._slow += [self.state.store.entries[group_id] for group_id in half]
        self._take_back_heldout(now)

    def hedge(self, now: float) -> None:
        """Lease groups that seem to hang to idle actors too, lowest slots first. Call it after all leases are handed
        out: an actor that still has room is idle."""
        if not self._slow:
            return
        state, slow = self.state, sorted(self._slow, key=lambda entry: entry.slot)
        self._slow = []
        if state.phase.started_at is None or state.phase.finishing or state.outbox.blocked:
            return
        at_work = [actor for actor in state.fleet.at_work(now) if actor.free_slots > 0]
        for entry in slow:
            if not may_be_hedged(entry, state.hedges):
                continue
            idle = [actor for actor in at_work if is_idle_for(actor, entry)]
            slots, bound = state.store.slots, state.replay.bound
            idle = [each for each in idle if slots.fits(entry.slot, each.version)]
            idle = [each for each in idle if bound.admits(entry.slot, each.version)]
            if idle:
                actor = max(idle, key=lambda actor: actor.free_slots)
                log.info("group %d makes no progress on %s: %s tries it too", entry.id, entry.actor, actor.name)
                _hedge(state, entry, actor, now)

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
        state.router.send(actor.peer, messages.Cancel(group_ids, hand_back=False))
        for group_id in group_ids:
            actor.running.pop(group_id, None)
            state.fleet.ready.touch(actor)
            entry = state.store.entries[group_id]
            entry.timeouts, entry.failed_on = entry.timeouts + 1, actor.name
            if state.runs_on_elsewhere(entry, actor):
                continue
            if entry.timeouts >= MOST_PER_GROUP:
                detail = f"on {entry.timeouts} leases, the last of {actor.name}"
                state.replay.drop(group_id, "timed out", detail)
                state.failures.add(group_id, "timed out", detail)
            else:
                state.replay.requeue(group_id)
        state.gauges.lease_timeouts += len(group_ids)
        self._hold_against(actor, len(group_ids), now)

    def _hold_against(self, actor: Actor, leases: int, now: float) -> None:
        """Bench an actor that lost leases to the deadline or to a hedge. If it hangs, tell it to quit."""
        actor.timed_out += leases
        if actor.benched_until == math.inf:
            return  # the actor already got `Quit`
        actor.benched_until, actor.benched_at = now + self.timeout, actor.version
        self.state.fleet.odd.add(actor.name)
        something_moves = any(now - moved < self.timeout / 2 for moved in actor.running.values())
        if actor.timed_out >= MOST_IN_A_ROW and not something_moves:
            self._tell_to_quit(actor, f"{actor.timed_out} leases in a row made no progress in time")

    def _tell_to_quit(self, actor: Actor, reason: str) -> None:
        actor.benched_until = math.inf
        self.state.fleet.odd.add(actor.name)
        log.warning("%s must quit: %s (buffer.lease_timeout)", actor.name, reason)
        self.state.router.send(actor.peer, messages.Quit(f"{reason} (buffer.lease_timeout)"))

    def _look_after_benched(self, actor: Actor, now: float) -> None:
        """Tell a benched actor to quit if it takes no new weights: without them it gets no lease to time out on."""
        is_behind = actor.timed_out > 0 and actor.version == actor.benched_at < self.state.weights.version
        actor.behind_since = min(actor.behind_since, now) if is_behind else math.inf
        is_back = actor.benched_until <= now
        if is_back and not actor.running and now - actor.behind_since > self.timeout:
            self._tell_to_quit(actor, f"it has taken no new weights since {actor.timed_out} of its leases hung")

    def _take_back_heldout(self, now: float) -> None:
        late: dict[str, int] = defaultdict(int)
        for row, name in self.state.evaluation.overdue(now, self.timeout):
            late[name] += 1
            self.state.note_evaluation(self.state.evaluation.take_back(row, MOST_PER_GROUP), now)
        for name, rows in late.items():
            log.warning("%s: no progress for %.0f s on %d held-out prompts", name, self.timeout, rows)
            if actor := self.state.fleet.by_name.get(name):
                self.state.gauges.lease_timeouts += rows
                self._hold_against(actor, rows, now)


def _hedge(state: RunState, entry: Entry, actor: Actor, now: float) -> None:
    """Lease a group that already runs on another actor to `actor` as well."""
    carried = [index for index, oldest in state.replay.usable(entry).items() if oldest >= entry.lease_version]
    state.hedges.add(entry, actor.name)
    actor.lease(entry.id, entry.launch, now)
    lease = Lease(entry.id, entry.row, "train", entry.launch, entry.need)
    send_leases(state, actor, [(lease, entry.partial, sorted(carried))])
