"""Plans of a cluster: a search over simulations, by split of the GPUs, mode, bound and knobs.

From an even split each mode climbs to its best one; the best sync and the best async plan then change one knob at a
time, as long as a change gains `GAIN`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from areal_like.config.registry import knobs
from areal_like.config.run_config import Config, ConfigError
from buffer.checks import RolloutsFail

from .costs import Costs, scaled
from .run import WARMUP_STEPS, Outcome, Simulation, Stuck, mean_of

GAIN, MOST_CHANGES = 0.02, 6
"""A change of a knob that gains less is not made; at most so many in a row."""
INTERVALS = (1, 2, 4)
"""Train steps between published weights, to try."""
TAILS, AGAIN, MOST_STEPS = 3.0, 4, 400
"""A rate is measured over so many times the slowest group and the batches that a bound lets be ahead, and, of the plans
that are shown, over so many times as many steps: among short measurements the luckiest comes first. At most
MOST_STEPS."""


@dataclass(frozen=True)
class Choice:
    """`actors` engines of `each` GPUs, a learner of `learner` GPUs; `bound` on staleness in versions (None: sync), with
    weights every `interval` train steps; `slots` of an engine."""

    actors: int
    learner: int
    bound: float | None
    slots: int
    interval: int
    tail: bool = False
    each: int = 1

    @property
    def gpus(self) -> int:
        return self.actors * self.each + self.learner

    @property
    def mode(self) -> str:
        words = ["sync" if self.bound is None else f"async, bound {self.bound:g}"]
        return ", ".join([*words, *(["tail batching"] if self.tail else [])])

    def overrides(self, config: Config) -> list[str]:
        """Keys that make the choice of a config."""
        found = [f"actors.count={self.actors}", f"weight_sync_interval={self.interval}"]
        found += ["mode=sync"] if self.bound is None else ["mode=async", f"scheduler.max_staleness={self.bound:g}"]
        found += ["scheduler.oversample_prompts=1.25"] if self.tail else []
        return found + ([f"engine.slots={self.slots}"] if "slots" in knobs("engine", config.engine.name) else [])

    def costs(self, one: Costs) -> Costs:
        """Costs of the choice, whose actors and learner share no cores."""
        engine = msgspec.structs.replace(one.engine, slots=self.slots)
        sample = msgspec.structs.replace(one.sample, cores=None)
        return scaled(msgspec.structs.replace(one, engine=engine, sample=sample), self.learner)


@dataclass(frozen=True)
class Plan:
    """A choice and what the simulation comes to in `steps`, of which the first `warmup` are not counted."""

    choice: Choice
    outcome: Outcome
    steps: int
    warmup: int

    @property
    def figures(self) -> dict[str, Any]:
        choice, outcome = self.choice, self.outcome
        return {
            "actors": choice.actors,
            "learner_gpus": choice.learner,
            "mode": choice.mode,
            "weight_sync_interval": choice.interval,
            "slots": choice.slots,
            "tokens_per_second": outcome.tokens_per_second,
            **outcome.figures,
            "lag_mean": mean_of(outcome.lags),
            "lag_max": max(outcome.lags, default=0),
        }


def splits(gpus: int, each: int, least: int) -> list[int]:
    """Numbers of actors to try, of `each` GPUs; the learner gets the rest, at least `least`. Raises ConfigError."""
    if (most := (gpus - least) // each) < 1:
        raise ConfigError(f"--gpus: got {gpus}, expected at least {each + least}: an actor's and the learner's")
    return sorted({max(1, min(most, round(gpus * part / 16 / each))) for part in (2, 4, 6, 8, 10, 12, 13, 14, 15)})


class Planner:
    """Simulates choices, none twice. `load` makes a config with overrides; `report` gets a line per simulation; `value`
    is maximised, among plans that are `allowed`."""

    def __init__(
        self,
        load: Callable[[Sequence[str]], Config],
        costs: Costs,
        value: Callable[[Plan], float],
        allowed: Callable[[Plan], bool] = lambda plan: True,
        report: Callable[[str], object] = lambda text: None,
    ):
        self._load, self.config = functools.cache(load), load([])
        self._costs = costs
        self.value, self.allowed, self._report = value, allowed, report
        self.made: dict[Choice, Plan] = {}
        self.left_out: dict[Choice, str] = {}

    def best(self) -> list[Plan]:
        """The allowed plans, the best first."""
        return sorted(filter(self.allowed, self.made.values()), key=self.value, reverse=True)

    def search(self, gpus: int, each: int, bounds: Sequence[float]) -> None:
        """Try splits in all modes, then knobs of the best sync and the best async plan. Raises ConfigError."""
        tried = splits(gpus, each, self._costs.learner.least)
        actors, slots, interval = tried[len(tried) // 2], self._costs.engine.slots, self.config.weight_sync_interval
        start = Choice(actors, gpus - actors * each, None, slots, interval, each=each)
        for mode in [start, replace(start, tail=True), *(replace(start, bound=bound) for bound in bounds)]:
            self._climb(mode, lambda choice: _other_splits(choice, tried))
        for sync in (True, False):
            if found := [plan for plan in self.best() if (plan.choice.bound is None) is sync]:
                self._climb(found[0].choice, lambda choice: self._around(choice, tried))

    def _climb(self, choice: Choice, around: Callable[[Choice], Iterable[Choice]]) -> None:
        """Go to the best allowed choice around, while that gains."""
        now = self._plan(choice)
        for _ in range(MOST_CHANGES):
            found = [plan for each in around(choice) if (plan := self._plan(each)) and self.allowed(plan)]
            better = max(found, key=self.value, default=None)
            if not better or (now and self.value(better) < (1.0 + GAIN) * self.value(now)):
                break
            now, choice = better, better.choice

    def _around(self, choice: Choice, tried: Sequence[int]) -> Iterator[Choice]:
        """Choices that differ in one knob. Other intervals keep the bound in train steps."""
        yield from _other_splits(choice, tried)
        if "slots" in knobs("engine", self.config.engine.name):
            yield from (replace(choice, slots=slots) for slots in (choice.slots // 2, choice.slots * 2) if slots)
        if choice.bound is None:
            yield replace(choice, tail=not choice.tail)
        for interval in INTERVALS if choice.bound else ():
            bound = (choice.bound or 0.0) * choice.interval / interval
            if bound >= 1 and (math.isinf(bound) or bound.is_integer()):
                yield replace(choice, bound=bound, interval=interval)

    def _plan(self, choice: Choice) -> Plan | None:
        """The plan of a choice; None where it cannot be simulated."""
        if choice in self.made or choice in self.left_out:
            return self.made.get(choice)
        try:
            self.made[choice] = self._simulated(choice)
        except (ConfigError, RolloutsFail, Stuck) as error:
            self.left_out[choice] = f"{choice.actors} actors, {choice.mode}: left out: {error}"
            self._report(self.left_out[choice])
        return self.made.get(choice)

    def _simulated(self, choice: Choice) -> Plan:
        ahead = 0.0 if choice.bound is None or math.isinf(choice.bound) else choice.bound
        steps = max(self.config.run.steps, math.ceil(TAILS * (1 + ahead)))
        while True:
            made = self._over(choice, steps)
            if steps >= MOST_STEPS or made.outcome.measured >= TAILS * made.outcome.slowest:
                return made
            steps = min(2 * steps, MOST_STEPS)

    def _over(self, choice: Choice, steps: int) -> Plan:
        samples = self.config.groups_per_batch * self.config.sizing.get("group_size", 8)
        warmup = WARMUP_STEPS + math.ceil(choice.slots * choice.actors / samples)  # until the pipeline is full
        config = self._load((*choice.overrides(self.config), f"run.steps={steps + warmup}"))
        outcome = Simulation(config, choice.costs(self._costs)).run(warmup)
        self._report(
            f"{choice.actors} actors, {choice.learner} GPUs for the learner, {choice.mode}, {choice.slots} slots, "
            f"weights every {choice.interval}: {outcome.samples_per_second:.4g} samples/s over {steps} steps"
        )
        return Plan(choice, outcome, steps + warmup, warmup)

    def again(self, plans: Iterable[Plan]) -> list[Plan]:
        """Each over `AGAIN` times as many steps, the best first."""
        for plan in plans:
            steps = min(AGAIN * (plan.steps - plan.warmup), MOST_STEPS)
            self.made[plan.choice] = self._over(plan.choice, steps)
        return sorted((self.made[plan.choice] for plan in plans), key=self.value, reverse=True)


def _other_splits(choice: Choice, tried: Sequence[int]) -> Iterator[Choice]:
    place = tried.index(choice.actors)
    for count in tried[max(0, place - 1) : place + 2]:
        yield replace(choice, actors=count, learner=choice.gpus - count * choice.each)
