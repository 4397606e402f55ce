"""A whole run in virtual time: the production buffer with modelled peers."""

from __future__ import annotations

import gc
import logging
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.engines.lengths import digest_of
from areal_like import messages
from areal_like.config import Config, actors_of
from areal_like.interfaces import Task
from areal_like.metrics import MetricsLog
from areal_like.registry import build
from areal_like.spans import Spans
from buffer.main import build_controller, build_replay, build_state
from buffer.outbox import Outbox
from buffer.schedulers import Scheduler

from .actors import Prompts, SimulatedActor, World
from .costs import Costs
from .learner import SimulatedLearner
from .timeline import SimulatedRouter, Timeline, Turns

WARMUP_STEPS = 3
"""The first batches fill the pipeline; rates leave them out."""
MOST_SPANS = 64
"""Actors whose spans are written."""


EVENTS_PER_LOOK = 100
"""Events between two looks at whether the run is stuck."""


class Stuck(RuntimeError):
    """Nothing happens any more, and the run is not over."""


@dataclass(frozen=True)
class Outcome:
    """What a simulated run came to. `samples_per_second` without the first steps; `staleness`: samples by age;
    `events`, `turns`: what the simulation took."""

    seconds: float
    samples_per_second: float
    actor_idle: float
    learner_idle: float
    staleness: dict[int, int]
    tokens: int
    report: dict[str, Any]
    events: int
    turns: int
    deaths: int = 0

    @property
    def staleness_mean(self) -> float:
        return sum(age * n for age, n in self.staleness.items()) / max(1, sum(self.staleness.values()))


def age_at(ages: Mapping[int, int], share: float) -> int:
    """The age that `share` of the counted samples do not exceed."""
    wanted, so_far = share * sum(ages.values()), 0
    for age in sorted(ages):
        so_far += ages[age]
        if so_far >= wanted:
            return age
    return 0


def prompts_of(task: Task, costs: Costs) -> Prompts:
    """The task's own prompts or, where `answers.prompt` says how long they are, made-up ones."""
    if (tokens := costs.answers.prompt) is not None:
        return Prompts(lambda split, row: (tokens, row + (split != "train"), 1 << 30), costs.answers.right)

    def of(split: str, row: int) -> tuple[int, int, int]:
        prompt = task.prompt("train" if split == "train" else "heldout", row)
        return len(prompt.tokens), digest_of(prompt.tokens), prompt.max_tokens

    return Prompts(of, costs.answers.right)


class Simulation:
    """`folder`: where metrics and spans go (None: nowhere)."""

    def __init__(self, config: Config, costs: Costs, folder: Path | None = None):
        self.config, self.costs = config, costs
        self.timeline = timeline = Timeline()
        self.router = router = SimulatedRouter(timeline, costs.latency)
        task: Task = build("task", config.task, config.run.seed)
        scheduler: Scheduler = build("scheduler", config.scheduler, build("sizing", config.sizing))
        self.state = build_state(config, task, router, Outbox(router, None), build_replay(config, scheduler), scheduler)  # type: ignore[arg-type]
        self.state.clock = timeline.clock
        self.controller = build_controller(config, self.state)
        self.controller.heartbeat_timeout, self.controller.deadlines.timeout = math.inf, 0.0  # peers do not fail
        self.turns = 0
        Turns(timeline, router, self._turn, costs.buffer, costs.sample.buffer)
        most = costs.answers.most or config.sampling.max_tokens
        prompts, cores = prompts_of(task, costs), [0.0] * (costs.sample.cores or 0)
        world = World(timeline, router, costs, prompts, config.run.seed, most, costs.answers.lengths, cores)
        fanout = actors_of(config) if config.weights.fanout is None else config.weights.fanout
        self.folder, self._new = (
            folder,
            lambda place: SimulatedActor(
                f"actor-{place}", world, depth(place, fanout), self._spans(folder, f"actor-{place}", place)
            ),
        )
        self.actors = [self._new(place) for place in range(actors_of(config))]
        self.deaths, self._dice = 0, random.Random(costs.failures.seed)
        spans = self._spans(folder, "learner")
        metrics = MetricsLog(folder / "metrics.jsonl") if folder else None
        self.learner = SimulatedLearner(config, timeline, router, costs, self._report, metrics, spans)

    @staticmethod
    def _spans(folder: Path | None, name: str, place: int = 0) -> Spans | None:
        return Spans(folder, name, since_1970=0.0) if folder and place < MOST_SPANS else None

    def _plan_death(self, place: int) -> None:
        if mean := self.costs.failures.mtbf:
            self.timeline.after(self._dice.expovariate(1.0 / mean), self._die, place)

    def _die(self, place: int) -> None:
        """As the starter of a run sees it: it tells the buffer, and starts another process of that name."""
        dead = self.actors[place]
        dead.report()
        dead.die()
        self.deaths += 1
        self.router.say(b"starter", messages.Lost(dead.name, 0, "died", False))
        self.timeline.after(self.costs.failures.restart, self._restart, place)

    def _restart(self, place: int) -> None:
        self.actors[place] = self._new(place)
        self.actors[place].hello()
        self._plan_death(place)

    def _turn(self) -> None:
        self.turns += 1
        self.controller.step(0)

    def _report(self) -> None:
        for actor in self.actors:
            actor.report()

    def run(self, warmup: int = WARMUP_STEPS) -> Outcome:
        """Rates leave out `warmup` train steps. Raises Stuck."""
        log = logging.getLogger("buffer")
        level, collects = log.level, gc.isenabled()
        log.setLevel(logging.ERROR)  # it warns of stalls after seconds that pass in no time here
        gc.disable()  # nothing here leaves cycles behind, and the collector would look at millions of sequences
        try:
            return self._run(warmup)
        finally:
            log.setLevel(level)
            if collects:
                gc.enable()

    def _run(self, warmup: int) -> Outcome:
        self.learner.hello()
        for place, actor in enumerate(self.actors):
            actor.hello()
            self._plan_death(place)
        steps, at, turns = 0, 0.0, 0
        while self.learner.report is None:
            if not self.timeline.run(EVENTS_PER_LOOK):
                raise Stuck("no event is left")
            if self.router.refusals:
                raise Stuck(f"the buffer refused a message: {self.router.refusals[0]}")
            if self.learner.steps != steps:
                steps, at, turns = self.learner.steps, self.timeline.now, self.turns
            elif self.timeline.now - at > 1e6 and self.turns - turns > 1000:
                raise Stuck(f"no train step in {self.timeline.now - at:.0f} s")
        return self._outcome(warmup)

    def _outcome(self, warmup: int) -> Outcome:
        learner, report = self.learner, self.learner.report
        assert report is not None
        first = min(warmup, learner.steps - 1)
        per_batch = learner.samples / learner.steps
        seconds = learner.seconds[-1] - (learner.seconds[first - 1] if first else 0.0)
        return Outcome(
            report["trained_seconds"],
            per_batch * (learner.steps - first) / max(1e-9, seconds),
            report.get("rollout/idle_share", 0.0),
            learner.idle_share,
            dict(sorted(learner.ages.items())),
            learner.tokens,
            report,
            self.timeline.events,
            self.turns,
            self.deaths,
        )


def depth(place: int, fanout: int) -> int:
    """Relays between the learner and the actor at this place (`buffer.relays`)."""
    levels = 0
    while fanout and (place := place // fanout - 1) >= 0:
        levels += 1
    return levels
