"""Plan a cluster: `areal-like plan CONFIG [key=value ...] --gpus 64 [--costs FILE] [--target tokens_per_second]`.

Searches over simulations with the production scheduler (`areal-like simulate`): splits of the GPUs between actors and
learner, sync and async with several bounds, slots, train steps between weights, tail batching. From an even split each
mode climbs to its best one; the best sync and the best async plan then change one knob at a time, as long as a change
gains `GAIN`. Prints the best plans and the best sync one, and writes a config of the first.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf

from areal_like.config import run_config as configs
from areal_like.config.registry import knobs
from areal_like.config.run_config import Config, ConfigError
from areal_like.errors import UserError
from buffer.checks import RolloutsFail

from .console.arguments import bound, command, interrupted, json_file, limit, new_file, positive, refuse
from .console.output import console, table, write_json
from .simulate import FAILURES, add_costs, costs_of
from .simulation.costs import Costs, scaled
from .simulation.run import WARMUP_STEPS, Outcome, Simulation, Stuck, mean_of

TARGETS = ("samples_per_second", "tokens_per_second")
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
    """`actors` engines of a GPU each, a learner of `learner` GPUs; `bound` on staleness in versions (None: sync), with
    weights every `interval` train steps; `slots` of an engine."""

    actors: int
    learner: int
    bound: float | None
    slots: int
    interval: int
    tail: bool = False

    @property
    def mode(self) -> str:
        mode = "sync" if self.bound is None else f"async, bound {self.bound:g}"
        return f"{mode}, tail batching" if self.tail else mode

    def overrides(self, config: Config) -> list[str]:
        """Keys that make the choice of a config."""
        found = [f"actors.count={self.actors}", f"weight_sync_interval={self.interval}"]
        found += ["mode=sync"] if self.bound is None else ["mode=async", f"scheduler.max_staleness={self.bound:g}"]
        found += ["scheduler.oversample_prompts=1.25"] if self.tail else []
        return found + ([f"engine.slots={self.slots}"] if "slots" in knobs("engine", config.engine.name) else [])


@dataclass(frozen=True)
class Plan:
    """A choice and what the simulation comes to in `steps` counted train steps."""

    choice: Choice
    outcome: Outcome
    steps: int

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


def splits(gpus: int) -> list[int]:
    """Numbers of actors to try; the learner gets the other GPUs. Raises ConfigError."""
    if gpus < 2:
        raise ConfigError(f"--gpus: got {gpus}, expected at least 2: an actor's and the learner's")
    return sorted({max(1, min(gpus - 1, round(gpus * part / 16))) for part in (2, 4, 6, 8, 10, 12, 13, 14, 15)})


class Planner:
    """Simulates choices, none twice, and prints a line for each on standard error. `load` makes a config with
    overrides; the figure `target` is maximised, among plans of a mean staleness of at most `most_stale` train steps."""

    def __init__(
        self,
        load: Callable[[tuple[str, ...]], Config],
        costs: Costs,
        target: str = TARGETS[0],
        most_stale: float = math.inf,
    ):
        self._load, self.config, self._costs = cache(load), load(()), costs
        self._target, self._most_stale = target, most_stale
        self.made: dict[Choice, Plan] = {}
        self.left_out: dict[Choice, str] = {}

    def value(self, plan: Plan) -> float:
        return float(plan.figures[self._target])

    def best(self) -> list[Plan]:
        """The allowed plans, the best first."""
        return sorted(filter(self._allowed, self.made.values()), key=self.value, reverse=True)

    def _allowed(self, plan: Plan) -> bool:
        return bool(plan.figures["lag_mean"] <= self._most_stale)

    def search(self, gpus: int, bounds: Sequence[float]) -> None:
        """Try splits in all modes, then knobs of the best sync and the best async plan. Raises ConfigError."""
        tried = splits(gpus)
        actors, slots, interval = tried[len(tried) // 2], self._costs.engine.slots, self.config.weight_sync_interval
        start = Choice(actors, gpus - actors, None, slots, interval)
        for mode in [start, replace(start, tail=True), *(replace(start, bound=most) for most in bounds)]:
            self._climb(mode, lambda choice: _other_splits(choice, tried))
        for sync in (True, False):
            if found := [plan for plan in self.best() if (plan.choice.bound is None) is sync]:
                self._climb(found[0].choice, lambda choice: self._around(choice, tried))

    def _climb(self, choice: Choice, around: Callable[[Choice], Iterable[Choice]]) -> None:
        """Go to the best allowed choice around, while that gains."""
        now = self._plan(choice)
        for _ in range(MOST_CHANGES):
            found = [plan for each in around(choice) if (plan := self._plan(each)) and self._allowed(plan)]
            better = max(found, key=self.value, default=None)
            if not better or (now and self.value(better) < (1.0 + GAIN) * self.value(now)):
                return
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
        if choice not in self.made and choice not in self.left_out:
            try:
                self.made[choice] = self._simulated(choice)
            except (ConfigError, RolloutsFail, Stuck) as error:
                self.left_out[choice] = f"{choice.actors} actors, {choice.mode}: left out: {error}"
                print(self.left_out[choice], file=sys.stderr)
        return self.made.get(choice)

    def _simulated(self, choice: Choice) -> Plan:
        ahead = 0.0 if choice.bound is None or math.isinf(choice.bound) else choice.bound
        steps = max(self.config.run.steps, math.ceil(TAILS * (1 + ahead)))
        while True:
            made = self._over(choice, steps)
            if steps >= MOST_STEPS or made.outcome.window >= TAILS * made.outcome.slowest:
                return made
            steps = min(2 * steps, MOST_STEPS)

    def _over(self, choice: Choice, steps: int) -> Plan:
        """Simulate `steps` train steps of a choice."""
        samples = self.config.groups_per_batch * self.config.sizing.get("group_size", 8)
        warmup = WARMUP_STEPS + math.ceil(choice.slots * choice.actors / samples)  # until the pipeline is full
        engine = msgspec.structs.replace(self._costs.engine, slots=choice.slots)
        costs = scaled(msgspec.structs.replace(self._costs, engine=engine), choice.learner)
        config = self._load((*choice.overrides(self.config), f"run.steps={steps + warmup}"))
        outcome = Simulation(config, costs).run(warmup)
        print(
            f"{choice.actors} actors, {choice.learner} GPUs for the learner, {choice.mode}, {choice.slots} slots, "
            f"weights every {choice.interval}: {outcome.samples_per_second:.4g} samples/s over {steps} steps",
            file=sys.stderr,
        )
        return Plan(choice, outcome, steps)

    def again(self, plans: Iterable[Plan]) -> list[Plan]:
        """Each over `AGAIN` times as many steps, the best first."""
        for plan in plans:
            self.made[plan.choice] = self._over(plan.choice, min(AGAIN * plan.steps, MOST_STEPS))
        return sorted((self.made[plan.choice] for plan in plans), key=self.value, reverse=True)


def _other_splits(choice: Choice, tried: Sequence[int]) -> Iterator[Choice]:
    place, gpus = tried.index(choice.actors), choice.actors + choice.learner
    for count in tried[max(0, place - 1) : place + 2]:
        yield replace(choice, actors=count, learner=gpus - count)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command("plan", __doc__)
    parser.add_argument("config", help="YAML file, or name of a shipped config")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, applied last")
    parser.add_argument("--gpus", type=positive, required=True, help="total number of GPUs")
    add_costs(parser)
    parser.add_argument("--target", choices=TARGETS, default=TARGETS[0], help=f"maximised rate (default: {TARGETS[0]})")
    parser.add_argument("--most-stale", type=limit, default=math.inf, metavar="N", help="largest mean, in train steps")
    parser.add_argument("--staleness", type=bound, nargs="+", default=[1, 4, 8], help="bounds (default: 1 4 8)")
    parser.add_argument("--steps", type=positive, default=12, metavar="N", help="least train steps (default: 12)")
    parser.add_argument("--best", type=positive, default=5, metavar="N", help="number of plans to print (default: 5)")
    parser.add_argument("--out", type=new_file, metavar="FILE", help="write the config of the best plan here")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="write all plans here (-: standard output)")
    return parser.parse_intermixed_args(argv)


def planned(args: argparse.Namespace) -> tuple[Planner, list[Plan]]:
    """The plans to show: the best, and the best sync one. Raises UserError where there is none."""

    def load(overrides: tuple[str, ...]) -> Config:
        return configs.load([args.config, *args.overrides, f"run.steps={args.steps}", *overrides])

    planner = Planner(load, costs_of(load(()), args), args.target, args.most_stale)
    planner.search(args.gpus, args.staleness)
    if not (best := planner.best()):
        raise UserError(f"--most-stale: got {args.most_stale}, which no plan keeps; left out: {planner.left_out}")
    shown, rest = best[: args.best], best[args.best :]
    if all(plan.choice.bound is not None for plan in shown):
        shown += [plan for plan in rest if plan.choice.bound is None][:1]
    return planner, planner.again(shown)


def recommended(args: argparse.Namespace, choice: Choice, config: Config) -> str:
    """A config that extends the planned one."""
    name = Path(args.config).resolve() if Path(args.config).suffix else args.config
    ranks = [f"learner.ranks={choice.learner}"] if "ranks" in knobs("learner", config.learner.name) else []
    keys = OmegaConf.from_dotlist([*args.overrides, *choice.overrides(config), *ranks])
    return f"extends: {name}\n{OmegaConf.to_yaml(keys)}"


def show(args: argparse.Namespace, plans: Iterable[Plan]) -> None:
    names = ("GPUs", "mode", "weights every", "slots", "samples/s", "tokens/s", "staleness", "max", "idle")
    rows = table(f"best plans for {args.gpus} GPUs by {args.target}", *names)
    for plan in plans:
        figures, choice = plan.figures, plan.choice
        rows.add_row(
            f"{choice.actors} + {choice.learner}",
            choice.mode,
            str(choice.interval),
            str(choice.slots),
            f"{figures['samples_per_second']:,.4g}",
            f"{figures['tokens_per_second']:,.0f}",
            f"{figures['lag_mean']:.2f}",
            str(figures["lag_max"]),
            f"{figures['actor_idle_share']:.0%}, {figures['learner_idle_share']:.0%}",
        )
    out = console()
    out.print(rows)
    out.print("GPUs: actors + learner. Staleness: train steps between sampling and training. Idle: actors, learner.")


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        planner, shown = planned(args)
    except KeyboardInterrupt:
        return interrupted("nothing is kept")
    except FAILURES as error:
        refuse(error)
    if args.json != Path("-"):
        show(args, shown)
    if args.out:
        args.out.write_text(recommended(args, shown[0].choice, planner.config))
    write_json(args.json, [plan.figures for plan in [*shown, *(each for each in planner.best() if each not in shown)]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
