"""A whole run in virtual time: the production buffer with modelled peers. Figures of it, and of a real run."""

import gc
import logging
import math
import random
from collections import Counter
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from areal_like.config import run_config as configs
from areal_like.config.registry import build
from areal_like.config.run_config import Config, ConfigError, actors_of, ranks_of
from areal_like.interfaces import Task
from areal_like.run.metrics import MetricsFollower
from areal_like.run.run_folder import summary_of
from areal_like.sampling import digest_of
from buffer import recovery
from buffer.entries import Stage
from buffer.main import build_dispatcher, build_groups, build_server, restore_scheduler
from buffer.outbox import Outbox
from buffer.schedulers import Scheduler

from .actors import PromptOf, SimulatedActor, World
from .costs import Costs
from .learner import SimulatedLearner
from .timeline import BufferLoop, SimulatedRouter, Stuck, Timeline

WARMUP_STEPS = 3
"""The first batches fill the pipeline; rates leave them out."""
STUCK_EVENTS = 300_000
"""A run is stuck after so many events, and 20 per slot, without another finished group or train step."""
SHARES = ("actor_idle_share", "learner_idle_share")


class Outcome(NamedTuple):
    """`figures`: those that are compared with a real run; the rates are over `window` seconds; seconds of the `slowest`
    group; samples by staleness in versions and in train steps (`lags`); trained tokens."""

    figures: dict[str, float]
    window: float
    slowest: float
    staleness: Counter[int]
    lags: Counter[int]
    tokens_per_second: float


def figures_of(run: Path) -> dict[str, float]:
    """The same figures of a real run that has ended. Raises ConfigError."""
    found, rows = summary_of(run), MetricsFollower(run / "metrics.jsonl").new_rows()
    rows = [row for row in rows if row.get("seconds") is not None and "staleness/histogram" in row]
    if found is None or not rows:
        raise ConfigError(f"{run}: got no summary or no train step, expected the folder of a run that has ended")
    ages = Counter[int]()
    for row in rows:
        ages.update({int(age): count for age, count in row["staleness/histogram"].items()})
    rate, _ = _rate(ages.total(), [row["seconds"] for row in rows], WARMUP_STEPS)
    return _figures(rate, ages, {name: found[name] for name in (*SHARES, "seconds")})


def _figures(rate: float, ages: Counter[int], others: dict[str, float]) -> dict[str, float]:
    stale = {"staleness_mean": mean_of(ages), "staleness_max": float(max(ages, default=0))}
    return {"samples_per_second": rate, **stale, **others}


def _rate(samples: int, seconds: list[float], warmup: int) -> tuple[float, float]:
    """Samples per second behind `warmup` steps, or of the last, and the window's seconds. `seconds`: at steps' ends."""
    if not seconds:
        return 0.0, 0.0
    first = min(warmup, len(seconds) - 1)
    window = seconds[-1] - (seconds[first - 1] if first else 0.0)
    return samples / len(seconds) * (len(seconds) - first) / max(1e-9, window), window


def mean_of(ages: Counter[int]) -> float:
    return sum(age * n for age, n in ages.items()) / max(1, ages.total())


def difference(name: str, simulated: float, measured: float) -> float:
    """Error of a simulated figure: absolute for shares and for staleness below 1, else relative to the measured one."""
    if name in SHARES or (name.startswith("staleness") and measured < 1.0):
        return simulated - measured
    return simulated / measured - 1.0 if measured else simulated


def prompt_of(task: Task, tokens: int | None, most: int | None) -> PromptOf:
    """The task's prompts, or made-up ones of so many `tokens`; answers have at most `most` tokens, if that is set."""
    if tokens is not None:
        return lambda split, row: (tokens, row + (split != "train"), most or 1 << 30)

    @lru_cache(1 << 16)
    def of(split: str, row: int) -> tuple[int, int, int]:
        prompt = task.prompt("train" if split == "train" else "heldout", row)
        return len(prompt.tokens), digest_of(prompt.tokens), most or prompt.max_tokens

    return of


class Simulation:
    """`history`: seed of everything that differs between runs of one config (jitter). Raises ConfigError for a run that
    does not begin at its first train step."""

    def __init__(self, config: Config, costs: Costs, history: int = 0):
        for key in ("replay", "resume"):
            if given := getattr(config, key):
                raise ConfigError(f"{key}: got {given}, expected null: a simulation begins a new run")
        if ranks_of(config) > 1:  # one modelled learner: its costs are those of all ranks
            config = configs.replace(config, "learner.ranks", 1)
        self.config, self.costs, self.timeline = config, costs, Timeline()
        self.router = router = SimulatedRouter(self.timeline, costs.latency)
        task: Task = build("task", config.task, config.run.seed)
        scheduler: Scheduler = build("scheduler", config.scheduler, build("sizing", config.sizing))
        groups = build_groups(config, scheduler)
        recovery.restore(groups, [], 0, 0.0)
        dispatcher = build_dispatcher(config, task, router, Outbox(router, None), groups, scheduler)  # type: ignore[arg-type]
        dispatcher.peers.clock = lambda: self.timeline.now
        restore_scheduler(scheduler, groups, dispatcher.gauges)
        self.buffer = build_server(config, dispatcher)
        self.buffer.presence.heartbeat_timeout, self.buffer.deadlines.timeout = math.inf, 0.0  # there are no heartbeats
        BufferLoop(router, partial(self.buffer.step, 0), costs.buffer, costs.sample.buffer)
        prompts = prompt_of(task, costs.answers.prompt, config.sampling.max_new_tokens)
        world = World(router, costs, prompts, config.run.seed, random.Random(history))
        count, fanout = actors_of(config), config.weights.fanout
        self.actors = []
        for place in range(count):
            update = costs.weights.seconds(place, count, count if fanout is None else fanout, costs.learner.gpus)
            self.actors.append(SimulatedActor(f"actor-{place}", world, update))
        self.learner = SimulatedLearner(config, router, costs, self.actors)

    def run(self, warmup: int = WARMUP_STEPS) -> Outcome:
        """Rates leave out `warmup` train steps. Raises Stuck."""
        logging.disable(logging.WARNING)  # the buffer warns of stalls after virtual seconds
        gc.disable()  # the collector would look at millions of sequences
        try:
            report = self._run()
        finally:
            logging.disable(logging.NOTSET)
            gc.enable()
        learner, ages = self.learner, self.learner.ages
        rate, window = _rate(ages.total(), learner.seconds, warmup)
        idle, all_seconds = map(sum, zip(*learner.idled, strict=True))
        shares = idle / max(1e-9, all_seconds), learner.waited / max(1e-9, learner.elapsed)
        others = dict(zip(SHARES, shares, strict=True)) | {"seconds": report["trained_seconds"] or 0.0}
        tokens = rate * learner.tokens / max(1, ages.total())
        return Outcome(_figures(rate, ages, others), window, learner.slowest, ages, learner.lags, tokens)

    def _run(self) -> dict[str, Any]:
        self.learner.hello()
        for actor in self.actors:
            actor.hello()
        mark, since = (-1, 0), 0
        patience = STUCK_EVENTS + 20 * len(self.actors) * self.costs.engine.slots
        while self.learner.report is None:
            if not self.timeline.run(100):
                raise Stuck("no event is left")
            now = self.learner.steps, self.buffer.store.entries.count(Stage.WAITING)
            if now > mark:
                mark, since = now, self.timeline.events
            elif self.timeline.events - since > patience:
                raise Stuck(f"stuck after train step {mark[0]}: {'; '.join(self.buffer.status.waits()[:3])[:480]}")
        return self.learner.report
