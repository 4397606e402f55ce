"""A modelled learner: it asks for batches, takes the time of a train step, publishes. See `learners.main`."""

from __future__ import annotations

import copy
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal_like.config.registry import settled
from areal_like.config.run_config import Config
from areal_like.run.checkpoints import is_due
from areal_like.run.metrics import MetricsLog
from areal_like.run.spans import Spans
from areal_like.run.stopping import reason_to_stop
from areal_like.wire import messages
from areal_like.wire.columns import RUN
from areal_like.wire.frames import Payloads
from areal_like.wire.groups import ROW
from areal_like.wire.messages import Message, Table

from .costs import Costs
from .timeline import SimulatedRouter, Timeline


@dataclass
class Progress:
    """How far a run has come; a checkpoint keeps it. `ages`: staleness → samples. `seconds`: since the first lease, of
    each step. `began_at`: when the clock of the first lease began."""

    steps: int = 0
    waited: float = 0.0
    elapsed: float = 0.0
    samples: int = 0
    tokens: int = 0
    ages: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    began_at: float | None = None

    def rate(self, warmup: int) -> float:
        """Samples per second without the first steps, but of one step at least; 0 without a step."""
        if not self.steps:
            return 0.0
        first = min(warmup, self.steps - 1)
        seconds = self.seconds[-1] - (self.seconds[first - 1] if first else 0.0)
        return self.samples / self.steps * (self.steps - first) / max(1e-9, seconds)


class SimulatedLearner:
    """Trains until the config's end, from `progress` on. `metrics`: where a row per train step goes. `before_report` is
    called before it asks for the final report. `report`: that of the buffer, once it is over. `saved`: the newest
    checkpoint; none are written unless they cost something or the learner may die. `works` is called when a train step
    begins, with its seconds and with those in which it publishes and writes metrics."""

    peer = b"learner"
    hears: Collection[type[Message]] = (messages.Batch, messages.Part, messages.Report)

    def __init__(
        self,
        config: Config,
        timeline: Timeline,
        router: SimulatedRouter,
        costs: Costs,
        before_report: Callable[[], None],
        metrics: MetricsLog | None = None,
        spans: Spans | None = None,
        progress: Progress | None = None,
    ):
        self.config, self.timeline, self.router, self.costs = config, timeline, router, costs.learner
        self.works: Callable[[float, float], None] = lambda training, after: None
        self._encode, self._before_report = costs.weights.encode, before_report
        self.metrics, self.spans = metrics, spans
        self.progress = progress or Progress()
        self.saved = copy.deepcopy(self.progress)
        self._streams = bool(settled("learner", config.learner).get("stream", False))
        self._saves = bool(costs.learner.checkpoint or costs.failures.learner)
        self._before = self.progress.elapsed, self.progress.waited
        self.began: float | None = None
        self.offset = 0.0  # seconds from the run's begin to that of this process
        self.dead = False
        self.report: dict[str, Any] | None = None
        self.reason = ""
        self._inbox: deque[messages.Batch | messages.Part] = deque()
        self._busy, self._waits_since, self._taken, self._take_seconds = False, 0.0, 0, 0.0
        router.peers[self.peer] = self

    def hello(self) -> None:
        self._say(messages.Hello("learner", "learner", 1, 0))
        if self._streams:
            self._say(messages.Stream())
        self._publish()
        self._want(self.progress.steps)
        self._waits_since = self.timeline.now
        self.reason = self._reason_to_stop()
        if self.reason:
            self.timeline.at(self.timeline.now, self._ask)  # behind the actors' hello

    def _reason_to_stop(self) -> str:
        progress = self.progress
        seconds = progress.seconds[-1] if progress.seconds else 0.0
        return reason_to_stop(self.config.run, progress.steps, seconds, progress.evaluations)

    def _say(self, message: Message) -> None:
        self.router.say(self.peer, message)

    def _want(self, index: int) -> None:
        self._say(messages.Want(index, index // self.config.weight_sync_interval))

    def die(self) -> None:
        self.dead = True

    def _publish(self) -> None:
        version = math.ceil(self.progress.steps / self.config.weight_sync_interval)
        self._say(messages.Published(messages.Manifest(version, f"v{version}")))

    def receive(self, message: Message, payloads: Payloads) -> None:
        match message:
            case messages.Batch() | messages.Part():
                self._inbox.append(message)
                self._next()
            case messages.Report():
                self.report, self.timeline.over = message.report, True

    def _next(self) -> None:
        """Work on what has come, in its order."""
        if self._busy or self.reason or self.dead or not self._inbox:
            return
        message = self._inbox.popleft()
        now = self.timeline.now
        self._busy = True
        if isinstance(message, messages.Part):
            if message.index != self.progress.steps or message.begin != self._taken:
                self._busy = False
                self._next()
                return
            self._taken += len(message.table.groups)
            cost = self._seconds(message.table)
            self._take_seconds += cost
            self.works(cost, 0.0)
            self._span("take", now, now + cost)
            self.timeline.after(cost, self._go_on)
            return
        if self.began is None:
            self.began = now
            begin = now - message.info["seconds"]
            if self.progress.began_at is None:
                self.progress.began_at = begin
            self.offset = begin - self.progress.began_at
        else:
            self.progress.waited += now - self._waits_since - self._take_seconds
        self._want(message.index + 1)
        cost = self.costs.base + self._seconds(message.table, self._taken)
        self._taken, self._take_seconds = 0, 0.0
        publishes = (self.progress.steps + 1) % self.config.weight_sync_interval == 0
        self.works(cost, publishes * self.costs.publish + self.costs.after)
        self._span("train", now, now + cost)
        self.timeline.after(cost, self._trained, message)

    def _go_on(self) -> None:
        self._busy = False
        self._next()

    def _span(self, name: str, begin: float, end: float) -> None:
        if self.spans:
            self.spans.add(name, begin, end)

    def _seconds(self, table: Table, first: int = 0) -> float:
        """What the groups from `first` on cost."""
        if not (self.costs.per_sample or self.costs.per_token):
            return 0.0
        skipped = sum(samples for _, samples, _ in table.groups[:first])
        lengths = np.frombuffer(table.rows, ROW)["response"][skipped:]
        return self.costs.per_sample * len(lengths) + self.costs.per_token * int(lengths.sum())

    def _trained(self, batch: messages.Batch) -> None:
        if self.dead:
            return
        self._say(messages.Trained(batch.index))
        self.progress.steps += 1
        published, now = self.progress.steps % self.config.weight_sync_interval == 0, self.timeline.now
        if published:
            self.timeline.after(self._encode, self._publish)
            self._span("publish", now, now + self.costs.publish)
        self.timeline.after((self.costs.publish if published else 0.0) + self.costs.after, self._finished, batch)

    def _finished(self, batch: messages.Batch) -> None:
        if self.dead:
            return
        assert self.began is not None
        progress, interval = self.progress, self.config.weight_sync_interval
        progress.elapsed = self._before[0] + self.timeline.now - self.began
        self._count(batch)
        self.reason = self._reason_to_stop()
        due = is_due(progress.steps, self.config.checkpoint.every, interval) or self.reason
        if self._saves and due and progress.steps % interval == 0:
            self._span("checkpoint", self.timeline.now, self.timeline.now + self.costs.checkpoint)
            self.timeline.after(self.costs.checkpoint, self._checkpointed)
        else:
            self._ask()

    def _checkpointed(self) -> None:
        if self.dead:
            return
        self.saved = copy.deepcopy(self.progress)
        self._say(messages.Checkpointed(self.progress.steps))
        self._ask()

    def _ask(self) -> None:
        """The step is over: wait for the next batch, or end."""
        self._busy = False
        self._waits_since = self.timeline.now
        if self.reason:
            self._before_report()
            self._say(messages.EndRun(self.reason, self.progress.steps))
            return
        self._next()

    def _count(self, batch: messages.Batch) -> None:
        info: dict[str, Any] = batch.info
        rows, runs = np.frombuffer(batch.table.rows, ROW), np.frombuffer(batch.table.runs, RUN)
        starts = np.cumsum(rows["runs"]) - rows["runs"]
        made = np.where(runs["version"] >= batch.oldest_allowed, runs["version"], batch.version + 1)
        ages = batch.version - np.minimum.reduceat(made, starts)
        batch_ages = Counter(ages[ages >= 0].tolist())
        self.progress.ages += batch_ages
        lengths = rows["response"]
        self.progress.samples += len(rows)
        self.progress.tokens += int(lengths.sum())
        info["seconds"] += self.offset  # a resumed run's clock starts anew
        self.progress.seconds.append(info["seconds"])
        evaluations = self.since_begin(info.pop("evaluations"))
        self.progress.evaluations += evaluations
        if not self.metrics:
            return
        row = {"step": self.progress.steps, "version": batch.version, **info, "train/idle_share": self.idle_share}
        row |= {"reward/mean": float(rows["reward"].mean()), "tokens": int(lengths.sum())}
        row |= {"staleness/mean": float(ages.mean()), "staleness/max": int(ages.max())}
        row["staleness/histogram"] = {str(age): count for age, count in sorted(batch_ages.items())}
        row |= {f"response_length/p{q}": float(np.percentile(lengths, q)) for q in (50, 95)}
        row |= {"response_length/mean": float(lengths.mean()), "response_length/max": int(lengths.max())}
        if evaluations:
            row |= {"eval/reward": evaluations[-1]["reward"], "eval/version": evaluations[-1]["version"]}
        self.metrics.write(row)

    def since_begin(self, evaluations: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Evaluations of this process, with the seconds since the begin of the run."""
        return [{**each, "seconds": each["seconds"] + self.offset} for each in evaluations]

    @property
    def idle_share(self) -> float:
        return self.progress.waited / max(1e-9, self.progress.elapsed)
