"""Which split of the GPUs, which mode and which bound: candidates, screened by the closed form, then simulated."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from areal_like import config as configs
from areal_like.config import Config, ConfigError

from .closed_form import Prediction, predict
from .costs import Costs
from .run import Outcome, Simulation, age_at, prompts_of

SCREENED = 0.6
"""Splits whose predicted throughput is below this share of the best are not simulated."""


@dataclass(frozen=True)
class Choice:
    """`actors` of `gpus_each` GPUs, `learner` GPUs; `bound`: None for sync."""

    actors: int
    learner: int
    bound: float | None
    tail: bool = False

    @property
    def mode(self) -> str:
        if self.bound is None:
            return "sync, tail batching" if self.tail else "sync"
        return f"async, η = {'∞' if math.isinf(self.bound) else f'{self.bound:g}'}"

    def overrides(self) -> list[str]:
        """What to add to the config."""
        found = [f"actors.count={self.actors}"]
        if self.bound is None:
            found.append("mode=sync")
            return [*found, "scheduler.oversample_prompts=1.25"] if self.tail else found
        return [*found, "mode=async", f"scheduler.max_staleness={'inf' if math.isinf(self.bound) else int(self.bound)}"]


@dataclass(frozen=True)
class Plan:
    """A choice, what the closed form says, and what the simulation does."""

    choice: Choice
    predicted: Prediction
    outcome: Outcome

    @property
    def staleness_p95(self) -> int:
        return age_at(self.outcome.staleness, 0.95)

    @property
    def binds(self) -> str:
        """The resource that holds the others up, in words."""
        actors, learner = self.outcome.actor_idle, self.outcome.learner_idle
        if learner < 0.1:
            return "training: more GPUs for the learner would help" if actors > 0.1 else "both sides are busy"
        if actors < 0.1:
            return "rollout: more GPUs for actors would help"
        if self.choice.bound is None:
            return "the round: actors and learner take turns, and wait for the longest answers"
        return "the bound: actors wait for new weights, the learner for the longest answers"


def splits(gpus: int, each: int) -> list[int]:
    """Numbers of actors to try, of `each` GPUs; the learner gets the rest, at least one."""
    most = (gpus - 1) // each
    if most < 1:
        raise ConfigError(f"{gpus} GPUs are too few: an actor takes {each}, the learner at least one")
    shares = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 13 / 16, 7 / 8, 15 / 16)
    return sorted({max(1, min(most, round(gpus * share / each))) for share in shares})


def scaled(costs: Costs, learner_gpus: int, efficiency: float) -> Costs:
    """Costs with a learner of so many GPUs: each doubling makes its steps `2 · efficiency` times as fast."""
    found = copy.deepcopy(costs)
    faster = (learner_gpus / costs.learner.gpus) * efficiency ** math.log2(learner_gpus / costs.learner.gpus)
    learner = found.learner
    learner.base, learner.per_sample = learner.base / faster, learner.per_sample / faster
    learner.per_token, learner.gpus = learner.per_token / faster, learner_gpus
    return found


def slower(costs: Costs, engine: float, learner: float) -> Costs:
    """Costs with an engine and a learner that take so many times as long."""
    found = copy.deepcopy(costs)
    for part, factor in ((found.engine, engine), (found.learner, learner)):
        for name in ("base", "per_sequence", "per_token", "prefill", "apply", "per_sample"):
            if hasattr(part, name):
                setattr(part, name, getattr(part, name) * factor)
    return found


def corners(config: Config, costs: Costs, off_by: float) -> list[Outcome]:
    """What the run comes to if engine and learner are each `off_by` times as slow or as fast as their costs say."""
    pairs = itertools.product((1 / off_by, off_by), repeat=2)
    return [Simulation(config, slower(costs, *pair)).run() for pair in pairs]


def plan(
    load: Callable[[Sequence[str]], Config],
    costs: Costs,
    choices: Iterable[Choice],
    efficiency: float,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Plan]:
    """The choices that the closed form does not rule out, simulated; the fastest first. `load` makes a config with
    overrides."""
    screened = []
    fitting = [choice for choice in choices if choice.learner >= costs.learner.least]
    if not fitting:
        raise ConfigError(
            f"the learner needs at least {costs.learner.least} GPUs for the model: give it more with --gpus"
        )
    for choice in fitting:
        config, cost = load(choice.overrides()), scaled(costs, choice.learner, efficiency)
        screened.append((choice, config, cost, _predict(config, cost, choice)))
    best = max(each.throughput for *_, each in screened)
    kept = [each for each in screened if each[3].throughput >= SCREENED * best]
    tell(f"{len(screened)} candidates, {len(kept)} of them to be simulated")
    plans = []
    for number, (choice, config, cost, predicted) in enumerate(kept, 1):
        outcome = Simulation(config, cost).run()
        plans.append(Plan(choice, predicted, outcome))
        where = f"{choice.actors} actors, {choice.learner} GPUs for the learner, {choice.mode}"
        tell(f"{number} of {len(kept)}: {where}: {outcome.samples_per_second:.4g} samples/s")
    return sorted(plans, key=lambda each: -each.outcome.samples_per_second)


def _predict(config: Config, costs: Costs, choice: Choice) -> Prediction:
    samples = config.groups_per_batch * configs.select(config, "sizing").get("group_size", 8)
    prompt, most = costs.answers.prompt, costs.answers.most or config.sampling.max_tokens
    if prompt is None or most is None:
        from areal_like.registry import build

        prompt_tokens, _, longest = prompts_of(build("task", config.task, config.run.seed), costs).of("train", 0)
        prompt, most = prompt_tokens if prompt is None else prompt, most or longest
    bound = 0.0 if choice.bound is None else choice.bound
    return predict(costs, choice.actors, samples, bound, sync=choice.bound is None, prompt=prompt, most=most)
