"""A modelled learner: it asks for batches, takes the time of a train step, publishes. See `learners.main`."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal_like.config.registry import settled
from areal_like.config.run_config import Config
from areal_like.run.stopping import reason_to_stop
from areal_like.wire import messages
from areal_like.wire.columns import RUN
from areal_like.wire.frames import Payloads
from areal_like.wire.groups import ROW
from areal_like.wire.messages import Message, Table

from .costs import Costs
from .timeline import SimulatedRouter


@dataclass
class Progress:
    """Train steps so far; seconds without a batch, and all since the first batch; trained samples and tokens; samples
    by staleness in versions (`ages`) and in train steps (`lags`), seconds of the `slowest` group, seconds
    since the first lease at each step, and evaluations."""

    steps: int = 0
    waited: float = 0.0
    elapsed: float = 0.0
    samples: int = 0
    tokens: int = 0
    ages: Counter[int] = field(default_factory=Counter)
    lags: Counter[int] = field(default_factory=Counter)
    slowest: float = 0.0
    seconds: list[float] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)


class SimulatedLearner:
    """Trains until the config's end. `before_report` is called before it asks for the final report. `report`: of the
    buffer, once the run is over."""

    peer = b"learner"

    def __init__(self, config: Config, router: SimulatedRouter, costs: Costs, before_report: Callable[[], None]):
        self.config, self.router, self.costs = config, router, costs.learner
        self.timeline, self.progress = router.timeline, Progress()
        self._encode, self._before_report = costs.weights.encode, before_report
        self._interval = config.weight_sync_interval
        self._streams = bool(settled("learner", config.learner).get("stream", False))
        self.report: dict[str, Any] | None = None
        self.reason = ""
        self._began: float | None = None
        self._inbox: deque[messages.Batch | messages.Part] = deque()
        self._busy, self._waits_since, self._taken, self._take_seconds = False, 0.0, 0, 0.0
        router.peers[self.peer] = self

    def hello(self) -> None:
        self._say(messages.Hello("learner", "learner", 1, 0))
        if self._streams:
            self._say(messages.Stream())
        self._publish()
        self._want(0)
        if self._is_over():
            self.timeline.after(0.0, self._finish)  # after the actors' hello

    def _say(self, message: Message) -> None:
        self.router.say(self.peer, message)

    def _want(self, index: int) -> None:
        self._say(messages.Want(index, index // self._interval))

    def _publish(self) -> None:
        version = math.ceil(self.progress.steps / self._interval)
        self._say(messages.Published(messages.Manifest(version, f"v{version}")))

    def _is_over(self) -> bool:
        progress = self.progress
        seconds = progress.seconds[-1] if progress.seconds else 0.0
        self.reason = reason_to_stop(self.config.run, progress.steps, seconds, progress.evaluations)
        return bool(self.reason)

    def receive(self, message: Message, payloads: Payloads) -> None:
        match message:
            case messages.Batch() | messages.Part():
                self._inbox.append(message)
                self._next()
            case messages.Report():
                self.report, self.timeline.over = message.report, True

    def _next(self) -> None:
        """Work on the received batches and parts, in their order."""
        while self._inbox and not self._busy and not self.reason:
            match self._inbox.popleft():
                case messages.Part() as part if (part.index, part.begin) == (self.progress.steps, self._taken):
                    self._busy = True
                    self._taken += len(part.table.groups)
                    cost = self._seconds(part.table)
                    self._take_seconds += cost
                    self.timeline.after(cost, self._go_on)
                case messages.Batch() as batch:
                    self._train(batch)

    def _train(self, batch: messages.Batch) -> None:
        self._busy, now = True, self.timeline.now
        if self._began is None:
            self._began = now
        else:
            self.progress.waited += now - self._waits_since - self._take_seconds
        self._want(batch.index + 1)
        cost = self.costs.base + self._seconds(batch.table, self._taken)
        self._taken, self._take_seconds = 0, 0.0
        self.timeline.after(cost, self._trained, batch)

    def _go_on(self) -> None:
        self._busy = False
        self._next()

    def _seconds(self, table: Table, first: int = 0) -> float:
        """Cost of the groups from `first` on."""
        skipped = sum(samples for _, samples, _ in table.groups[:first])
        lengths = np.frombuffer(table.rows, ROW)["response"][skipped:]
        return self.costs.per_sample * len(lengths) + self.costs.per_token * int(lengths.sum())

    def _trained(self, batch: messages.Batch) -> None:
        self._say(messages.Trained(batch.index))
        self._count(batch)
        self.progress.steps += 1
        wait = self.costs.after
        if self.progress.steps % self._interval == 0:
            self.timeline.after(self._encode, self._publish)
            wait += self.costs.publish
        self.timeline.after(wait, self._finish)

    def _finish(self) -> None:
        """End the step: wait for the next batch, or end the run."""
        if self._began is not None:
            self.progress.elapsed = self.timeline.now - self._began
        self._busy, self._waits_since = False, self.timeline.now
        if self._is_over():
            self._before_report()
            self._say(messages.EndRun(self.reason, self.progress.steps))
        self._next()

    def _count(self, batch: messages.Batch) -> None:
        progress = self.progress
        rows, runs = np.frombuffer(batch.table.rows, ROW), np.frombuffer(batch.table.runs, RUN)
        made = np.where(runs["version"] >= batch.oldest_allowed, runs["version"], batch.version + 1)
        oldest = np.minimum.reduceat(made, np.cumsum(rows["runs"]) - rows["runs"])
        oldest = oldest[oldest <= batch.version]
        progress.ages.update((batch.version - oldest).tolist())
        progress.lags.update((progress.steps - self._interval * oldest).tolist())
        progress.samples += len(rows)
        progress.slowest = max(progress.slowest, *(seconds for _, _, seconds in batch.table.groups))
        progress.tokens += int(rows["response"].sum())
        progress.seconds.append(batch.info["seconds"])
        progress.evaluations += batch.info["evaluations"]

    @property
    def idle_share(self) -> float:
        return self.progress.waited / max(1e-9, self.progress.elapsed)
