"""Which split of the GPUs, which mode, bound and knobs: candidates, screened by the closed form, then simulated.

The grid of splits, modes and bounds comes first. From the fastest of it a search changes one knob at a time, as long as
a change gains `GAIN`. Both run the production scheduler.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from areal_like.config import run_config as configs
from areal_like.config.registry import knobs, settled
from areal_like.config.run_config import Config, ConfigError
from buffer.checks import RolloutsFail

from .closed_form import Prediction, predict
from .costs import Costs, scaled
from .run import WARMUP_STEPS, Outcome, Simulation, Stuck, age_at, prompts_of

Found = TypeVar("Found")
SCREENED = 0.6
"""Splits whose predicted throughput is below this share of the best are not simulated."""
GAIN = 0.02
"""A changed knob that gains less is not worth a setting of its own."""
MOST_CHANGES = 6
"""Each costs a simulation per knob."""
TAILS = 3.0
"""A rate is measured over so many times the longest answer of a batch, and so many times the batches that a bound lets
be ahead: a run stands, then hurries."""
AGAIN = 4
"""Times as many steps: of the plans that are shown."""
MOST_STEPS = 400
"""More are not simulated."""


@dataclass(frozen=True)
class Choice:
    """`actors` engines, `learner` GPUs; `bound`: None for sync. What is None is as the config says: `slots` of an
    engine, `interval` of train steps between published weights, `group_size` with as many samples per batch. `each`:
    GPUs of an engine."""

    actors: int
    learner: int
    bound: float | None
    tail: bool = False
    stream: bool = False
    slots: int | None = None
    interval: int | None = None
    group_size: int | None = None
    groups: int | None = None
    each: int = 1

    @property
    def gpus(self) -> int:
        return self.actors * self.each + self.learner

    @property
    def split(self) -> str:
        """GPUs of actors and of the learner."""
        return f"{self.actors * self.each} + {self.learner}"

    @property
    def mode(self) -> str:
        return ", ".join(self._words())

    def _words(self) -> Iterator[str]:
        if self.bound is None:
            yield "sync"
        else:
            yield f"async, η = {'∞' if math.isinf(self.bound) else f'{self.bound:g}'}"
        if self.tail:
            yield "tail batching"
        if self.stream:
            yield "stream"
        if self.slots is not None:
            yield f"{self.slots} slots"
        if self.interval is not None:
            yield "weights every step" if self.interval == 1 else f"weights every {self.interval} steps"
        if self.group_size is not None:
            yield f"groups of {self.group_size}"

    def overrides(self) -> list[str]:
        """What to add to the config."""
        found = [f"actors.count={self.actors}", "mode=sync" if self.bound is None else "mode=async"]
        if self.bound is not None:
            found.append(f"scheduler.max_staleness={'inf' if math.isinf(self.bound) else int(self.bound)}")
        changes = {
            "scheduler.oversample_prompts": 1.25 if self.tail else None,
            "learner.stream": "true" if self.stream else None,
            "engine.slots": self.slots,
            "weight_sync_interval": self.interval,
            "sizing.group_size": self.group_size,
            "groups_per_batch": self.groups,
        }
        return found + [f"{key}={value}" for key, value in changes.items() if value is not None]

    def settled(self, config: Config, costs: Costs) -> Choice:
        """The same setting without what `config` and `costs`, to which it is added, say already: equal settings are
        equal then."""
        size = configs.select(config, "sizing").get("group_size")
        same = self.group_size in (None, size)
        return replace(
            self,
            stream=self.stream and not settled("learner", config.learner).get("stream", False),
            slots=None if self.slots == costs.engine.slots else self.slots,
            interval=None if self.interval == config.weight_sync_interval else self.interval,
            group_size=None if same else self.group_size,
            groups=None if same else self.groups,
        )

    def costs(self, one: Costs, efficiency: float) -> Costs:
        """Those of the choice, from those of one engine and one learner."""
        found = scaled(one, self.learner, efficiency)
        found.engine.slots = self.slots or found.engine.slots
        return found


@dataclass(frozen=True)
class Knobs:
    """What the search may change beside the split and the slots. Group sizes change what is learned, so only those that
    somebody asked for are tried."""

    intervals: Sequence[int] = (1, 2, 4)
    group_sizes: Sequence[int] = ()

    def around(self, choice: Choice, config: Config, costs: Costs) -> list[Choice]:
        """Choices that differ in one knob. Some may make no config."""
        tried = splits(choice.gpus, choice.each)
        at = tried.index(choice.actors)
        near = [tried[place] for place in (at - 1, at + 1) if 0 <= place < len(tried)]
        found = [replace(choice, actors=count, learner=choice.gpus - count * choice.each) for count in near]
        if "slots" in knobs("engine", config.engine.name):
            now = choice.slots or costs.engine.slots
            found += [replace(choice, slots=slots) for slots in (now // 2, now * 2) if slots]
        found += list(self._intervals(choice, config.weight_sync_interval))
        if choice.bound is None:
            found += [replace(choice, tail=not choice.tail), replace(choice, stream=True)]
        size = configs.select(config, "sizing").get("group_size")
        samples = config.groups_per_batch * size if size else 0
        for other in self.group_sizes if size else ():
            if other != size and samples % other == 0:
                found.append(replace(choice, group_size=other, groups=samples // other))
        return [each for each in found if each.learner >= costs.learner.least]

    def _intervals(self, choice: Choice, now: int) -> Iterator[Choice]:
        """Other intervals, with a bound of as many train steps: policy lag is not what the search buys speed with."""
        for interval in self.intervals:
            if choice.bound and interval != now:
                bound = choice.bound * now / interval
                if bound >= 1 and (math.isinf(bound) or bound.is_integer()):
                    yield replace(choice, bound=bound, interval=interval)


@dataclass(frozen=True)
class Plan:
    """A choice, what the closed form says, and what the simulation does in `steps`, the first `warmup` not counted."""

    choice: Choice
    predicted: Prediction
    outcome: Outcome
    steps: int
    warmup: int

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.outcome.samples_per_second

    @property
    def tokens_per_second(self) -> float:
        """Trained ones."""
        return self.rate * self.outcome.tokens / max(1, sum(self.outcome.staleness.values()))

    @property
    def gpu_hours(self) -> float:
        """Of a million samples."""
        return self.choice.gpus * 1e6 / self.rate / 3600

    def staleness_at(self, share: float) -> int:
        return age_at(self.outcome.staleness, share)

    @property
    def staleness_shares(self) -> dict[int, float]:
        """Age in versions → share of the samples."""
        ages = self.outcome.staleness
        return {age: count / sum(ages.values()) for age, count in ages.items()}

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


def slower(costs: Costs, engine: float, learner: float) -> Costs:
    """Costs with an engine and a learner that take so many times as long."""
    found = copy.deepcopy(costs)
    for part, factor in ((found.engine, engine), (found.learner, learner)):
        for name in ("base", "per_sequence", "per_token", "prefill", "apply", "per_sample"):
            if hasattr(part, name):
                setattr(part, name, getattr(part, name) * factor)
    return found


def corners(config: Config, costs: Costs, off_by: float, warmup: int = WARMUP_STEPS) -> list[Outcome]:
    """What the run comes to if engine and learner are each `off_by` times as slow or as fast as their costs say, or as
    they say."""
    pairs = [(1.0, 1.0), *itertools.product((1 / off_by, off_by), repeat=2)]
    return [Simulation(config, slower(costs, *pair)).run(warmup) for pair in pairs]


class Planner:
    """Simulates choices, none twice. `load` makes a config with overrides; `tell` gets a line for each simulation.

    made        all plans so far, by what they set
    predicted   what the closed form says of the grids' choices
    left_out    choices that cannot be simulated, and why
    """

    def __init__(
        self,
        load: Callable[[Sequence[str]], Config],
        costs: Costs,
        efficiency: float,
        tell: Callable[[str], None] = lambda text: None,
        value: Callable[[Plan], float] = lambda made: made.rate,
    ):
        self._loaded = functools.cache(load)  # as long as a thousand events of a simulation; configs are read-only
        self._costs, self._efficiency, self._tell, self._value = costs, efficiency, tell, value
        self._base = load([])
        self.made: dict[Choice, Plan] = {}
        self.predicted: dict[Choice, Prediction] = {}
        self.left_out: dict[Choice, str] = {}

    def screened(self, choices: Iterable[Choice], most_stale: float = math.inf) -> list[Choice]:
        """Those that make a config, and that the closed form does not rule out: it compares with the best of those
        whose mean staleness may be wanted. Raises ConfigError where the model fits on no learner."""
        wanted = list(dict.fromkeys(each.settled(self._base, self._costs) for each in choices))
        fitting = [each for each in wanted if each.learner >= self._costs.learner.least]
        if not fitting:
            raise ConfigError(
                f"the learner needs at least {self._costs.learner.least} GPUs for the model: give it more with --gpus"
            )
        predicted = dict(self._each(fitting, self._predicted))
        self.predicted |= predicted
        best = max((each.throughput for each in predicted.values() if each.staleness <= most_stale), default=0.0)
        kept = [choice for choice, each in predicted.items() if each.throughput >= SCREENED * best]
        self._tell(f"{len(fitting)} candidates, {len(kept)} of them to be simulated")
        return kept

    def promised(self, choices: Iterable[Choice]) -> float:
        """Samples per second of the best of them by the closed form."""
        settled = (each.settled(self._base, self._costs) for each in choices)
        fitting = (each for each in settled if each.learner >= self._costs.learner.least)
        return max((found.throughput for _, found in self._each(fitting, self._predicted)), default=0.0)

    def grid(self, choices: Iterable[Choice], most_stale: float = math.inf) -> list[Plan]:
        """The screened choices, simulated; the best first. Raises ConfigError."""
        return self.best_first(self.tried(self.screened(choices, most_stale)))

    def search(self, start: Plan, knobs: Knobs, allowed: Callable[[Plan], bool]) -> list[Plan]:
        """What the search simulated from `start`: it goes to the best of the allowed plans around, while that gains.
        What was simulated before was no better. Choices that make no config are left out."""
        now, found = start, list[Plan]()
        for _ in range(MOST_CHANGES):
            config = self._loaded(tuple(now.choice.overrides()))
            around = (each.settled(self._base, self._costs) for each in knobs.around(now.choice, config, self._costs))
            known = {*self.made, *self.left_out}
            made = self.best_first(self.tried([each for each in dict.fromkeys(around) if each not in known]))
            found += made
            better = next(filter(allowed, made), now)
            if self._value(better) < (1.0 + GAIN) * self._value(now):
                break
            now = better
        return found

    def best_first(self, plans: Iterable[Plan]) -> list[Plan]:
        return sorted(plans, key=self._value, reverse=True)

    def tried(self, choices: Iterable[Choice]) -> list[Plan]:
        """Those of them that can be simulated."""
        settled = [each.settled(self._base, self._costs) for each in choices]
        return [plan for _, plan in self._each(settled, self._simulated)]

    def _each(self, choices: Iterable[Choice], call: Callable[[Choice], Found]) -> Iterator[tuple[Choice, Found]]:
        for choice in choices:
            try:
                yield choice, call(choice)
            except (ConfigError, RolloutsFail, Stuck) as error:
                self.left_out[choice] = f"{choice.split}, {choice.mode}: left out: {error}"
                self._tell(self.left_out[choice])

    def _predicted(self, choice: Choice) -> Prediction:
        return _predict(self._loaded(tuple(choice.overrides())), choice.costs(self._costs, self._efficiency), choice)

    def _simulated(self, choice: Choice) -> Plan:
        if choice in self.made:
            return self.made[choice]
        config, costs = self._loaded(tuple(choice.overrides())), choice.costs(self._costs, self._efficiency)
        predicted, samples = _predict(config, costs, choice), samples_of(config)
        warmup = WARMUP_STEPS + math.ceil(costs.engine.slots * choice.actors / samples)  # until the pipeline is full
        ahead = 0.0 if choice.bound is None or math.isinf(choice.bound) else choice.bound
        steps = max(config.run.steps, math.ceil(TAILS * (1 + ahead)))
        while True:
            made = self._over(choice, predicted, costs, steps, warmup)
            if steps >= MOST_STEPS or steps * samples >= TAILS * predicted.longest * made.rate:
                break
            steps = min(2 * steps, MOST_STEPS)
        self.made[choice] = made
        self._tell_of(made)
        return made

    def _over(self, choice: Choice, predicted: Prediction, costs: Costs, steps: int, warmup: int) -> Plan:
        longer = self._loaded((*choice.overrides(), f"run.steps={steps + warmup}"))
        return Plan(choice, predicted, Simulation(longer, costs).run(warmup), steps + warmup, warmup)

    def _tell_of(self, made: Plan, words: str = "") -> None:
        choice = made.choice
        where = f"{choice.actors} actors, {choice.learner} GPUs for the learner, {choice.mode}"
        self._tell(f"{where}: {made.rate:.4g} samples/s{words}")

    def again(self, best: Iterable[Plan]) -> list[Plan]:
        """Each over `AGAIN` times as many steps, the best first: among many short looks the luckiest comes first."""
        found = []
        for each in best:
            costs = each.choice.costs(self._costs, self._efficiency)
            steps = min(AGAIN * (each.steps - each.warmup), MOST_STEPS)
            made = self._over(each.choice, each.predicted, costs, steps, each.warmup)
            self._tell_of(made, f" over {steps} steps")
            self.made[each.choice] = made
            found.append(made)
        return self.best_first(found)


def samples_of(config: Config) -> int:
    """Of a batch."""
    return config.groups_per_batch * configs.select(config, "sizing").get("group_size", 8)


def _predict(config: Config, costs: Costs, choice: Choice) -> Prediction:
    samples = samples_of(config)
    prompt, most = costs.answers.prompt, costs.answers.most or config.sampling.max_new_tokens
    if prompt is None or most is None:
        from areal_like.config.registry import build

        prompt_tokens, _, longest = prompts_of(build("task", config.task, config.run.seed), costs).of("train", 0)
        prompt, most = prompt_tokens if prompt is None else prompt, most or longest
    bound = 0.0 if choice.bound is None else choice.bound
    sync, interval = choice.bound is None, config.weight_sync_interval
    return predict(costs, choice.actors, samples, bound, sync=sync, prompt=prompt, most=most, interval=interval)
