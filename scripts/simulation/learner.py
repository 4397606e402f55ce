"""A modelled learner: it asks for batches, takes the time of a train step, publishes. See `learners.main`."""

import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_like.config.run_config import Config
from areal_like.run.run_folder import reason_to_stop
from areal_like.wire import messages
from areal_like.wire.frames import Payloads
from areal_like.wire.groups import ROW, RUN
from areal_like.wire.messages import Message

from .actors import SimulatedActor
from .costs import Costs
from .timeline import SimulatedRouter


class SimulatedLearner:
    """Trains until the config's end. `report`: of the buffer, once the run is over. `waited`: seconds without a batch,
    of `elapsed` since the first one; `idled`: of each actor, at the end; samples by staleness in versions (`ages`) and
    in train steps (`lags`); `seconds` since the first lease at the end of each step, and of the `slowest` group."""

    peer = b"learner"

    def __init__(self, config: Config, router: SimulatedRouter, costs: Costs, actors: Sequence[SimulatedActor]):
        self.config, self.router, self.costs, self._actors = config, router, costs.learner, actors
        self.timeline, self._encode = router.timeline, costs.weights.encode
        self._interval = config.weight_sync_interval
        self.steps = self.tokens = 0
        self.idled: list[tuple[float, float]] = []
        self.waited = self.elapsed = self.slowest = 0.0
        self.ages, self.lags = Counter[int](), Counter[int]()
        self.seconds, self._evaluations = list[float](), list[dict[str, Any]]()
        self.report: dict[str, Any] | None = None
        self.reason = ""
        self._began: float | None = None
        self._inbox: deque[messages.Batch] = deque()
        self._busy, self._waits_since = False, 0.0
        router.peers[self.peer] = self

    def hello(self) -> None:
        self._say(messages.Hello("learner", "learner", 1, 0))
        self._publish()
        self._want(0)
        if self._is_over():
            self.timeline.after(0.0, self._finish)  # after the actors' hello

    def _say(self, message: Message) -> None:
        self.router.say(self.peer, message)

    def _want(self, index: int) -> None:
        self._say(messages.Want(index, index // self._interval))

    def _publish(self) -> None:
        version = math.ceil(self.steps / self._interval)
        self._say(messages.Published(messages.Manifest(version, f"v{version}")))

    def _is_over(self) -> bool:
        seconds = self.seconds[-1] if self.seconds else 0.0
        self.reason = reason_to_stop(self.config, self.steps, seconds, self._evaluations)
        return bool(self.reason)

    def receive(self, message: Message, payloads: Payloads) -> None:
        match message:
            case messages.Batch():
                self._inbox.append(message)
                self._next()
            case messages.Report():
                self.report, self.timeline.over = message.report, True

    def _next(self) -> None:
        """Begin a train step on the next received batch, unless one is under way or the run is over."""
        if not self._inbox or self._busy or self.reason:
            return
        batch, now = self._inbox.popleft(), self.timeline.now
        self._busy = True
        if self._began is None:
            self._began = now
        else:
            self.waited += now - self._waits_since
        self._want(batch.index + 1)
        lengths, costs = np.frombuffer(batch.table.rows, ROW)["response"], self.costs
        seconds = costs.base + costs.per_sample * len(lengths) + costs.per_token * int(lengths.sum())
        self.timeline.after(seconds, self._trained, batch)

    def _trained(self, batch: messages.Batch) -> None:
        self._say(messages.Trained(batch.index))
        self._count(batch)
        self.steps += 1
        published = self.steps % self._interval == 0
        if published:
            self.timeline.after(self._encode, self._publish)
        self.timeline.after(self.costs.publish if published else 0.0, self._finish)

    def _finish(self) -> None:
        if self._began is not None:
            self.elapsed = self.timeline.now - self._began
        self._busy, self._waits_since = False, self.timeline.now
        if self._is_over():
            self.idled = [actor.idled() for actor in self._actors]
            self._say(messages.EndRun(self.reason, self.steps))
        self._next()

    def _count(self, batch: messages.Batch) -> None:
        rows, runs = np.frombuffer(batch.table.rows, ROW), np.frombuffer(batch.table.runs, RUN)
        made = np.where(runs["version"] >= batch.oldest_allowed, runs["version"], batch.version + 1)
        oldest = np.minimum.reduceat(made, np.cumsum(rows["runs"]) - rows["runs"])
        oldest = oldest[oldest <= batch.version]
        self.ages.update((batch.version - oldest).tolist())
        self.lags.update((self.steps - self._interval * oldest).tolist())
        self.slowest = max(self.slowest, *(seconds for _, _, seconds in batch.table.groups))
        self.tokens += int(rows["response"].sum())
        self.seconds.append(batch.info["seconds"])
        self._evaluations += batch.info["evaluations"]
