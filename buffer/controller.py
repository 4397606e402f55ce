"""The buffer's loop: messages in, decisions by the scheduler and the policy, messages out. One thread, no locks
(only the journal has a thread of its own, which waits for the disk).

Who waits for what:
  an actor    waits for leases        → unblocked by `dispatch.admit`: a trained batch, an applied version, a freed slot
  the learner waits for a batch       → unblocked by `dispatch.serve`: a push
  all         wait for the start      → unblocked by `_start`: enough actors hold version 0
`RunState` holds all state that matters; `handlers` changes it when a message comes.
"""

from __future__ import annotations

import logging
import math

from areal_like.wire import messages
from areal_like.wire.link import BusError
from buffer.deadlines import Deadlines
from buffer.dispatch import admit, evaluate, revoke, serve
from buffer.handlers import Handlers
from buffer.run_state import RunState
from buffer.status import status, waits

log = logging.getLogger(__name__)
STALL_SECONDS = 20.0
MESSAGES_PER_TURN = 1000
"""A peer that floods the buffer can't stop its decisions. The socket takes from all peers in turn."""


class Controller:
    """Drives one run. Enough actors must be ready within `ready_timeout` seconds. An actor that is silent for
    `heartbeat_timeout` seconds loses its leases. A lease without progress for `lease_timeout` seconds (0: never) ends.
    A message waits until the journal holds the records that it depends on (`state.outbox`)."""

    def __init__(
        self,
        state: RunState,
        *,
        heartbeat_timeout: float,
        ready_timeout: float = math.inf,
        lease_timeout: float = 0.0,
    ):
        self.state, self.handlers = state, Handlers(state)
        self.deadlines = Deadlines(state, lease_timeout)
        self.heartbeat_timeout, self.ready_timeout = heartbeat_timeout, ready_timeout
        self._born = self._last_turn = state.phase.progress_at = state.clock()

    def run(self) -> None:
        """Run until SIGTERM raises SystemExit."""
        while True:
            self.step(timeout=0.2)

    def step(self, timeout: float) -> None:
        """One turn: handle messages, decide, send. Separate from `run` so that tests can drive it."""
        self._receive(timeout)  # first: decisions need all that is known
        now = self.state.clock()
        self._drop_silent_actors(now)  # before leases: their groups go to others in the same turn
        self.deadlines.enforce(now)
        self._start(now)
        self.state.announce()  # before leases: with `injection` it opens the slots of the new version
        self.state.replay.recall_losers()  # after pushes, which take places; before the scheduler counts the queue
        revoke(self.state)  # before leases: an actor must hear that a lease ended before it gets the same group again
        evaluate(self.state, now)  # before training leases, which would take all the room
        admit(self.state, now)  # before serving: the batch that the learner waits for may exceed the memory limit
        self.deadlines.hedge(now)  # after leases: an actor that still has room is idle
        serve(self.state, now)  # revokes groups that are too old at once: the next turn may come late
        self._report_when_finished()
        self.state.outbox.flush()  # last: write the decisions to the disk; send messages whose records are there
        self._watch(now)

    def _receive(self, timeout: float) -> None:
        timeout = self.state.outbox.patience(timeout)
        for _ in range(MESSAGES_PER_TURN):
            received = self.state.router.receive(timeout)
            if received is None:
                break
            self.handlers.handle(*received)
            timeout = 0

    def _drop_silent_actors(self, now: float) -> None:
        if now - self._last_turn > self.heartbeat_timeout / 2:
            self.state.fleet.restart_clocks(now)  # this process was stopped: the silence of others proves nothing
            self.state.evaluation.restart_clocks(now)
        self._last_turn = now
        for actor in self.state.fleet.silent(now, self.heartbeat_timeout):
            log.warning("%s: no sign of life for %.0f s, its leases go to others", actor.name, self.heartbeat_timeout)
            self.state.lose(actor)

    def _start(self, now: float) -> None:
        if self.state.phase.started_at is not None:
            return
        # An engine has its own time limit: a large model starts more slowly than the processes connect.
        starting = any(actor.engine == "starting" for actor in self.state.fleet)
        if now - self._born > self.ready_timeout and not starting:
            raise BusError(f"after {self.ready_timeout:.0f} s (launcher.ready_timeout) {'; '.join(waits(self.state))}")
        ready = sum(actor.version >= 0 for actor in self.state.fleet)
        if self.state.learner.peer and ready >= self.state.expected_actors:
            self.state.phase.started_at = self.state.phase.progress_at = now
            self.state.gauges.start(now)
            log.info("all %d actors hold version 0: first lease", ready)

    def _report_when_finished(self) -> None:
        state = self.state
        if state.phase.finishing and not state.phase.reported and state.evaluation.finished and state.learner.peer:
            state.phase.reported = True
            state.router.send(state.learner.peer, messages.Report(status(state)))

    def _watch(self, now: float) -> None:
        phase = self.state.phase
        if phase.started_at is not None and not phase.finishing and now - phase.progress_at > STALL_SECONDS:
            phase.progress_at = now
            log.warning("no progress for %.0f s: %s", STALL_SECONDS, "; ".join(waits(self.state)) or "nothing waits")
