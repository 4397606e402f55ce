"""Plan a cluster: `areal-like plan CONFIG [key=value ...] --gpus 64 [--costs FILE] [--target tokens_per_second]`.

Simulates the production scheduler (`areal-like simulate`) for every split of the GPUs between actors and learner, sync,
sync with tail batching, and async with several bounds. Prints the best plans and the best sync one; writes a config.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from areal_like.config import run_config as configs
from areal_like.config.registry import knobs
from areal_like.config.run_config import Config, ConfigError
from areal_like.errors import UserError
from buffer.checks import RolloutsFail

from .console.arguments import bound, command, json_file, new_file, positive, refusing
from .console.output import console, table, write_json
from .simulate import add_arguments, costs_of
from .simulation.costs import Costs, scaled
from .simulation.run import WARMUP_STEPS, Outcome, Simulation, mean_of

TARGETS = ("samples_per_second", "tokens_per_second")
COLUMNS = {
    "samples/s": ("samples_per_second", ",.4g"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "staleness": ("lag_mean", ".2f"),
    "max": ("lag_max", "d"),
    "actors idle": ("actor_idle_share", ".0%"),
    "learner idle": ("learner_idle_share", ".0%"),
}
"""Column → figure and its format."""
TAILS, AGAIN, MOST_STEPS = 3.0, 4, 400
"""A rate is measured over so many times the slowest group and the batches that a bound lets be ahead, and, of the plans
that are shown, over so many times as many steps: the luckiest short measurement comes first. At most MOST_STEPS."""


@dataclass(frozen=True)
class Choice:
    """`actors` engines of a GPU each, a learner of `learner` GPUs; `bound` on staleness in versions (None: sync)."""

    actors: int
    learner: int
    bound: float | None
    tail: bool = False

    @property
    def mode(self) -> str:
        mode = "sync" if self.bound is None else f"async, bound {self.bound:g}"
        return f"{mode}, tail batching" if self.tail else mode

    @property
    def overrides(self) -> list[str]:
        found = [f"actors.count={self.actors}"]
        found += ["mode=sync"] if self.bound is None else ["mode=async", f"scheduler.max_staleness={self.bound:g}"]
        return found + ["scheduler.oversample_prompts=1.25"] * self.tail


@dataclass(frozen=True)
class Plan:
    """A choice and what the simulation comes to in `steps` counted train steps."""

    choice: Choice
    outcome: Outcome
    steps: int

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "actors": self.choice.actors,
            "learner_gpus": self.choice.learner,
            "mode": self.choice.mode,
            "tokens_per_second": self.outcome.tokens_per_second,
            **self.outcome.figures,
            "lag_mean": mean_of(self.outcome.lags),
            "lag_max": max(self.outcome.lags, default=0),
        }


def choices(gpus: int, bounds: Sequence[float]) -> list[Choice]:
    """Raises ConfigError."""
    if gpus < 2:
        raise ConfigError(f"--gpus: got {gpus}, expected at least 2: an actor's and the learner's")
    splits = sorted({max(1, min(gpus - 1, round(gpus * part / 16))) for part in (2, 4, 6, 8, 10, 12, 14, 15)})
    modes: list[tuple[float | None, bool]] = [(None, False), (None, True), *((each, False) for each in bounds)]
    return [Choice(actors, gpus - actors, *mode) for mode, actors in product(modes, splits)]


class Planner:
    """Simulates choices, with a line for each on standard error. `load` makes a config; `target` is maximised."""

    def __init__(self, load: Callable[[tuple[str, ...]], Config], costs: Costs, target: str = TARGETS[0]):
        self._load, self.config, self._costs, self._target = load, load(()), costs, target

    def best(self, tried: Iterable[Choice]) -> list[Plan]:
        """The plans, the best first; those that cannot be simulated are left out."""
        found = []
        for choice in tried:
            try:
                found.append(self._simulated(choice))
            except (UserError, RolloutsFail) as error:
                print(f"{choice.actors} actors, {choice.mode}: left out: {error}", file=sys.stderr)
        return self._sorted(found)

    def again(self, plans: Iterable[Plan]) -> list[Plan]:
        """Each over `AGAIN` times as many steps, the best first."""
        return self._sorted(self._over(plan.choice, min(AGAIN * plan.steps, MOST_STEPS)) for plan in plans)

    def _sorted(self, plans: Iterable[Plan]) -> list[Plan]:
        return sorted(plans, key=lambda plan: float(plan.figures[self._target]), reverse=True)

    def _simulated(self, choice: Choice) -> Plan:
        ahead = 0.0 if choice.bound is None or math.isinf(choice.bound) else choice.bound
        steps = max(self.config.run.steps, math.ceil(TAILS * (1 + ahead)))
        while True:
            made = self._over(choice, steps)
            if steps >= MOST_STEPS or made.outcome.window >= TAILS * made.outcome.slowest:
                return made
            steps = min(2 * steps, MOST_STEPS)

    def _over(self, choice: Choice, steps: int) -> Plan:
        samples = self.config.groups_per_batch * self.config.sizing.get("group_size", 8)
        warmup = WARMUP_STEPS + math.ceil(self._costs.engine.slots * choice.actors / samples)  # a full pipeline
        config = self._load((*choice.overrides, f"run.steps={steps + warmup}"))
        outcome = Simulation(config, scaled(self._costs, choice.learner)).run(warmup)
        print(
            f"{choice.actors} actors, {choice.learner} GPUs for the learner, {choice.mode}: "
            f"{outcome.figures['samples_per_second']:.4g} samples/s over {steps} steps",
            file=sys.stderr,
        )
        return Plan(choice, outcome, steps)


def recommended(args: argparse.Namespace, choice: Choice, config: Config) -> str:
    """A config that extends the planned one."""
    name = Path(args.config).resolve() if Path(args.config).suffix else args.config
    ranks = [f"learner.ranks={choice.learner}"] if "ranks" in knobs("learner", config.learner.name) else []
    keys = OmegaConf.from_dotlist([*args.overrides, *choice.overrides, *ranks])
    return f"extends: {name}\n{OmegaConf.to_yaml(keys)}"


def show(args: argparse.Namespace, plans: Iterable[Plan]) -> None:
    rows = table(f"best plans for {args.gpus} GPUs by {args.target}", "actors + learner", "mode", *COLUMNS)
    for plan in plans:
        cells = (format(plan.figures[name], form) for name, form in COLUMNS.values())
        rows.add_row(f"{plan.choice.actors} + {plan.choice.learner}", plan.choice.mode, *cells)
    console().print(rows)


def main(argv: list[str] | None = None) -> int:
    parser = command("plan", __doc__)
    add_arguments(parser)
    parser.add_argument("--gpus", type=positive, required=True, help="total number of GPUs")
    parser.add_argument("--target", choices=TARGETS, default=TARGETS[0], help=f"maximised rate (default: {TARGETS[0]})")
    parser.add_argument("--staleness", type=bound, nargs="+", default=[1, 4, 8], help="bounds (default: 1 4 8)")
    parser.add_argument("--steps", type=positive, default=12, metavar="N", help="least train steps (default: 12)")
    parser.add_argument("--best", type=positive, default=5, metavar="N", help="number of plans to print (default: 5)")
    parser.add_argument("--out", type=new_file, metavar="FILE", help="file for the config of the best plan")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="file for all plans (-: standard output)")
    args = parser.parse_intermixed_args(argv)

    def load(overrides: tuple[str, ...]) -> Config:
        return configs.load([args.config, *args.overrides, f"run.steps={args.steps}", *overrides])

    with refusing(RolloutsFail):
        planner = Planner(load, costs_of(load(()), args), args.target)
        best = planner.best(choices(args.gpus, args.staleness))
        if not best:
            raise UserError(f"--gpus: got {args.gpus}, with which no plan can be simulated")
        first_sync = [plan for plan in best if plan.choice.bound is None][:1]
        chosen = best[: args.best] + [plan for plan in first_sync if plan not in best[: args.best]]
        shown, rest = planner.again(chosen), [plan for plan in best if plan not in chosen]
    if args.json != Path("-"):
        show(args, shown)
    if args.out:
        args.out.write_text(recommended(args, shown[0].choice, planner.config), encoding="utf-8")
    write_json(args.json, [plan.figures for plan in [*shown, *rest]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
