"""Plan a cluster: `python -m scripts.plan CONFIG [key=value ...] --gpus 64 [--costs FILE] [--target cost]`.

Tries splits of the GPUs between actors and learner, sync and async with several bounds. A closed form screens them; the
rest is simulated with the production scheduler (`python -m scripts.simulate`). From the best sync and the best async
plan a search goes on, a knob at a time: slots, train steps between published weights, tail batching, stream, and the
group sizes that are named. Prints the best for the target (`scripts.simulation.targets`) with what holds each up, and
writes the config that it recommends.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_like.config import run_config as configs
from areal_like.config.run_config import Config, ConfigError
from areal_like.errors import UserError
from buffer.checks import RolloutsFail

from .console.arguments import (
    amount,
    bound,
    command,
    factor,
    interrupted,
    limit,
    new_file,
    picture,
    positive,
    refuse,
    share,
)
from .console.output import console, write_json
from .simulation import plan_report as report
from .simulation import roofline
from .simulation.costs import EFFICIENCY, on_its_own
from .simulation.planning import SCREENED, Choice, Knobs, Plan, Planner, corners, splits
from .simulation.run import Stuck
from .simulation.targets import Target, target
from .simulation.traffic import traffic


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command("plan", __doc__)
    parser.add_argument("config", help="a yaml file, or the name of a shipped one")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, applied last")
    parser.add_argument("--gpus", type=positive, required=True, help="of actors and learner together")
    parser.add_argument("--gpus-per-actor", type=positive, default=1, metavar="N", help="of one engine (default: 1)")
    parser.add_argument(
        "--target",
        type=target,
        default=Target(),
        metavar="WHAT",
        help="samples_per_second (default) or tokens_per_second: most of them on all GPUs; cost: fewest GPU-hours per "
        "sample, GPUs may stay unused; samples_per_second=N: the fewest GPUs that come to N",
    )
    parser.add_argument("--most-stale", type=limit, default=math.inf, metavar="N", help="largest mean staleness wanted")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="what things cost, for one actor and one learner")
    parser.add_argument(
        "--hardware", choices=roofline.GPUS, help="costs by public figures; of --costs only the lengths"
    )
    parser.add_argument("--staleness", type=bound, nargs="+", default=[1, 4, 8], metavar="N", help="bounds to try")
    parser.add_argument(
        "--weight-intervals",
        type=positive,
        nargs="+",
        default=[1, 2, 4],
        metavar="N",
        help="train steps between weights",
    )
    parser.add_argument(
        "--group-sizes",
        type=positive,
        nargs="+",
        default=[],
        metavar="N",
        help="to try, with as many samples per batch",
    )
    parser.add_argument("--steps", type=positive, default=12, metavar="N", help="train steps to simulate (default: 12)")
    parser.add_argument("--efficiency", type=share, default=EFFICIENCY, help="of the learner, per doubling of its GPUs")
    parser.add_argument(
        "--off-by",
        type=factor,
        metavar="F",
        help="costs are right within this factor (default: not asked; "
        f"with --hardware {roofline.OFF_BY:g}): adds the range of each figure",
    )
    parser.add_argument(
        "--density",
        type=share,
        metavar="F",
        help="share of the weights that a version changes (publish/density of a run): updates are deltas of so much",
    )
    parser.add_argument("--price", type=amount, metavar="P", help="of a GPU-hour: adds the cost of a million samples")
    parser.add_argument("--best", type=positive, default=5, metavar="N", help="plans to print (default: 5)")
    parser.add_argument("--out", type=new_file, metavar="FILE", help="write the recommended config here")
    parser.add_argument(
        "--plot", type=picture, metavar="FILE", help="draw throughput against the split, and staleness against η"
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all figures here")
    return parser.parse_intermixed_args(argv)


def choices(gpus: int, each: int, bounds: Sequence[float]) -> list[Choice]:
    found = []
    for actors in splits(gpus, each):
        learner = gpus - actors * each
        found += [Choice(actors, learner, None, each=each), Choice(actors, learner, None, tail=True, each=each)]
        found += [Choice(actors, learner, most, each=each) for most in bounds]
    return found


def searched(planner: Planner, grid: Sequence[Plan], tried: Knobs, most_stale: float) -> list[Plan]:
    """The plans of the grid and those of a search from the best of each kind, whose mean staleness is allowed."""

    def allowed(made: Plan) -> bool:
        return made.outcome.staleness_mean <= most_stale

    found = list(filter(allowed, grid))
    starts = {made.choice.bound is None: made for made in reversed(found)}  # the last one stays: the best
    for start in starts.values():
        found += filter(allowed, planner.search(start, tried, allowed))
    return planner.best_first(found)


class Planning:
    """The work of the command: nothing but its progress is printed before all of it is done, and nothing written."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.out = args, console()
        self.config = self.load([])
        self.cost = roofline.known(self.config, args.costs, args.hardware, args.gpus_per_actor)
        on_its_own(self.cost)
        self.traffic = traffic(self.config, args.density)
        if args.hardware and args.density and self.traffic:
            self.cost.weights.size = self.traffic.sent  # public figures take whole weights
        self.planner = Planner(self.load, self.cost, args.efficiency, self.out.print, args.target.value)
        self.plans = self._plans()
        self.best = self.plans[0]
        self.ranges = self._ranges()
        self.bounds = self._bounds() if args.plot else []

    def load(self, overrides: Sequence[str]) -> Config:
        args = self.args
        return configs.load([args.config, *args.overrides, f"run.steps={args.steps}", *overrides])

    @property
    def off_by(self) -> float | None:
        return self.args.off_by or (roofline.OFF_BY if self.args.hardware else None)

    def _plans(self) -> list[Plan]:
        """The best for the target first. Raises UserError where there is none."""
        args, found = self.args, list[Plan]()
        tried = Knobs(args.weight_intervals, args.group_sizes)
        for total in args.target.totals(args.gpus, args.gpus_per_actor):
            wanted = choices(total, args.gpus_per_actor, args.staleness)
            if total == args.gpus or self._may_do(wanted):
                found += searched(self.planner, self.planner.grid(wanted, args.most_stale), tried, args.most_stale)
            if any(map(args.target.reached, found)):
                break
        if not found and self.planner.left_out and not self.planner.made:
            raise UserError(f"no candidate could be simulated. The last: {list(self.planner.left_out.values())[-1]}")
        if not found:
            raise UserError(f"no candidate has a mean staleness of at most {args.most_stale:g}: try lower --staleness")
        best = args.target.best_first(found)
        return [*args.target.best_first(self.planner.again(best[: args.best])), *best[args.best :]]

    def _may_do(self, wanted: Sequence[Choice]) -> bool:
        """Fewer GPUs than there are: does the model fit, and could they reach the target rate?"""
        target = self.args.target
        if max(each.learner for each in wanted) < self.cost.learner.least:
            return False
        if target.enough is None or target.figure != "samples_per_second":
            return True
        return self.planner.promised(wanted) >= SCREENED * target.enough

    def _ranges(self) -> dict[str, tuple[float, float]]:
        """Of the best, where costs are not exact."""
        if self.off_by is None:
            return {}
        choice, steps = self.best.choice, f"run.steps={self.best.steps}"
        costs = choice.costs(self.cost, self.args.efficiency)
        return report.ranges(corners(self.load([*choice.overrides(), steps]), costs, self.off_by, self.best.warmup))

    def _bounds(self) -> list[Plan]:
        """The best one's split with each bound, for the picture."""
        best, bounds = self.best.choice, sorted(set(self.args.staleness))
        return self.planner.tried([Choice(best.actors, best.learner, most, each=best.each) for most in bounds])

    def say(self) -> list[dict[str, Any]]:
        """Print the best, and return the figures of all."""
        args, say = self.args, self.out.print
        found = [report.figures(made, self.config, self.traffic, args.price) for made in self.plans]
        say(report.rows(f"the best for up to {args.gpus} GPUs, by {args.target}", self.plans[: args.best]))
        say("GPUs: actors + learner. Age: versions between sampling and training, mean. Idle: actors, learner.")
        say(f"Costs from {self.cost.source}.")
        for number, (made, its) in enumerate(zip(self.plans[: args.best], found, strict=False), 1):
            for line in report.details(number, made, its):
                say(line)
        note = self.traffic.note if self.traffic else "not known: neither engine nor learner computes a model"
        say(f"bytes of weights: {note}")
        if args.target.enough is not None and not args.target.reached(self.best):
            say(f"NOT reached: {args.target} with at most {args.gpus} GPUs; the first comes nearest")
        if self.ranges:
            found[0] |= {"ranges": self.ranges}
            say(f"if costs of engine and learner are each off by up to {self.off_by:g} times, of the first:")
            say(report.told(self.ranges))
        return found


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        planning = Planning(args)
        found = planning.say()
        if args.out:
            config = report.recommended(args.config, args.overrides, planning.best.choice, planning.config)
            args.out.write_text(config)
            planning.out.print(f"written: {args.out}")
        if args.plot:
            from .simulation.plan_picture import draw

            draw(args.plot, planning.best, planning.planner, planning.bounds)
        write_json(args.json, found)
    except KeyboardInterrupt:
        return interrupted("nothing is kept: run the same command to start again")
    except (ConfigError, UserError, OSError, ValueError, RolloutsFail, Stuck) as error:
        refuse(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
