"""Plan a cluster: `python -m scripts.plan CONFIG [key=value ...] --gpus 64 [--costs FILE] [--staleness 0 1 4 8 inf]`.

Tries splits of the GPUs between actors and learner, sync and async with several bounds. A closed form screens them; the
rest is simulated with the production scheduler (`python -m scripts.simulate`). From the best sync and the best async
plan a search goes on, a knob at a time: slots, train steps between published weights, tail batching, stream, and the
group sizes that are named. Prints the best with what holds each up, and writes the config that it recommends.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_like import config as configs
from areal_like.config import Config, ConfigError
from areal_like.errors import UserError
from areal_like.registry import knobs

from .arguments import command, new_file, picture, positive, refuse
from .output import console, table, write_json
from .simulation import results, roofline
from .simulation.planning import Choice, Knobs, Plan, Planner, corners, fastest_first, splits
from .simulation.run import Outcome, Stuck

COLUMNS = ("actors + learner", "mode", "samples/s", "closed form", "staleness", "p95", "idle: actors", "learner")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command("plan", __doc__)
    parser.add_argument("config", help="a yaml file, or the name of a shipped one")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, applied last")
    parser.add_argument("--gpus", type=positive, required=True, help="of actors and learner together")
    parser.add_argument("--gpus-per-actor", type=positive, default=1, metavar="N", help="of one engine (default: 1)")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="what things cost, for one actor and one learner")
    parser.add_argument(
        "--hardware", choices=roofline.GPUS, help="costs by public figures; of --costs only the lengths"
    )
    parser.add_argument("--staleness", type=float, nargs="+", default=[1, 4, 8], metavar="N", help="bounds to try")
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
    parser.add_argument("--most-stale", type=float, default=math.inf, metavar="N", help="largest mean staleness wanted")
    parser.add_argument("--steps", type=positive, default=12, metavar="N", help="train steps to simulate (default: 12)")
    parser.add_argument("--efficiency", type=float, default=0.95, help="of the learner, per doubling of its GPUs")
    parser.add_argument(
        "--off-by",
        type=float,
        metavar="F",
        help="costs are right within this factor (default: not asked; "
        f"with --hardware {roofline.OFF_BY:g}): adds the range of each figure",
    )
    parser.add_argument("--price", type=float, metavar="P", help="of a GPU-hour: adds the cost of a million samples")
    parser.add_argument("--best", type=positive, default=5, metavar="N", help="rows to print (default: 5)")
    parser.add_argument("--out", type=new_file, metavar="FILE", help="write the recommended config here")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw throughput against the split here")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all figures here")
    return parser.parse_intermixed_args(argv)


def choices(gpus: int, each: int, bounds: Sequence[float]) -> list[Choice]:
    found = []
    for actors in splits(gpus, each):
        learner = gpus - actors * each
        found += [Choice(actors, learner, None), Choice(actors, learner, None, tail=True)]
        found += [Choice(actors, learner, bound) for bound in bounds]
    return found


def searched(planner: Planner, grid: Sequence[Plan], tried: Knobs, most_stale: float) -> list[Plan]:
    """The plans of the grid and those of a search from the fastest of each kind, whose mean staleness is allowed."""

    def allowed(made: Plan) -> bool:
        return made.outcome.staleness_mean <= most_stale

    found = list(filter(allowed, grid))
    starts = {made.choice.bound is None: made for made in reversed(found)}  # the last one stays: the fastest
    for start in starts.values():
        found += filter(allowed, planner.search(start, tried, allowed))
    return fastest_first(found)


def figures(made: Plan, gpus: int, price: float | None) -> dict[str, Any]:
    rate = made.outcome.samples_per_second
    hours = gpus * 1e6 / rate / 3600
    found: dict[str, Any] = {
        "actors": made.choice.actors,
        "learner_gpus": made.choice.learner,
        "mode": made.choice.mode,
        "samples_per_second": rate,
        "closed_form": made.predicted.throughput,
        "staleness_mean": made.outcome.staleness_mean,
        "staleness_p95": made.staleness_p95,
        "actor_idle_share": made.outcome.actor_idle,
        "learner_idle_share": made.outcome.learner_idle,
        "gpu_hours_per_million_samples": hours,
        "binds": made.binds,
    }
    return found | ({} if price is None else {"cost_per_million_samples": hours * price})


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    out = console()

    def load(overrides: Sequence[str]) -> Config:
        return configs.load([args.config, *args.overrides, f"run.steps={args.steps}", *overrides])

    try:
        config = load([])
        cost = roofline.known(config, args.costs, args.hardware, args.gpus_per_actor)
        wanted = choices(args.gpus, args.gpus_per_actor, args.staleness)
        planner = Planner(load, cost, args.efficiency, out.print)
        knobs_tried = Knobs(args.gpus, args.gpus_per_actor, args.weight_intervals, args.group_sizes)
        plans = searched(planner, planner.grid(wanted), knobs_tried, args.most_stale)
    except (ConfigError, UserError, OSError, ValueError, Stuck) as error:
        refuse(error)
    if not plans:
        refuse(f"no candidate has a mean staleness of at most {args.most_stale:g}: try lower --staleness")
    rows = table(f"the best for {args.gpus} GPUs; costs from {cost.source}", *COLUMNS)
    for made in plans[: args.best]:
        choice, outcome = made.choice, made.outcome
        rows.add_row(
            f"{choice.actors * args.gpus_per_actor} + {choice.learner}",
            choice.mode,
            f"{outcome.samples_per_second:.4g}",
            f"{made.predicted.throughput:.4g}",
            f"{outcome.staleness_mean:.2f}",
            f"{made.staleness_p95}",
            f"{outcome.actor_idle:.0%}",
            f"{outcome.learner_idle:.0%}",
        )
    out.print(rows)
    found = [figures(made, args.gpus, args.price) for made in plans]
    best = found[0]
    price = f", cost {best['cost_per_million_samples']:,.0f}" if args.price is not None else ""
    out.print(f"what holds the first up: {best['binds']}")
    out.print(f"a million samples take {best['gpu_hours_per_million_samples']:,.0f} GPU-hours{price}")
    off_by = args.off_by or (roofline.OFF_BY if args.hardware else 0.0)
    if off_by:
        choice, steps = plans[0].choice, f"run.steps={plans[0].steps}"
        costs = choice.costs(cost, args.efficiency)
        outcomes = corners(load([*choice.overrides(), steps]), costs, off_by, plans[0].warmup)
        found[0] |= {"ranges": ranges(outcomes)}
        out.print(f"if costs of engine and learner are each off by up to {off_by:g} times: {told(ranges(outcomes))}")
    if args.out:
        args.out.write_text(recommended(args.config, args.overrides, plans[0].choice, config))
        out.print(f"written: {args.out}")
    if args.plot:
        draw(plans, args.plot, args.gpus)
    write_json(args.json, found)
    return 0


def ranges(outcomes: Sequence[Outcome]) -> dict[str, tuple[float, float]]:
    """Figure → its least and its largest value."""
    all_figures = [results.figures(each) for each in outcomes]
    names = [name for name in all_figures[0] if name != "seconds"]
    return {name: (min(each[name] for each in all_figures), max(each[name] for each in all_figures)) for name in names}


def told(found: dict[str, tuple[float, float]]) -> str:
    pairs = {name: [results.shown(name, value) for value in both] for name, both in found.items()}
    return ", ".join(f"{name.replace('_', ' ')} {low} to {high}" for name, (low, high) in pairs.items())


def recommended(base: str, overrides: Sequence[str], choice: Choice, config: Config) -> str:
    """A config that extends the one that was planned."""
    from omegaconf import OmegaConf

    name = str(Path(base).resolve()) if Path(base).suffix else base
    ranks = [f"learner.ranks={choice.learner}"] if "ranks" in knobs("learner", config.learner.name) else []
    keys = OmegaConf.from_dotlist([*overrides, *choice.overrides(), *ranks])
    return f"extends: {name}\n{OmegaConf.to_yaml(keys)}"


def draw(plans: Sequence[Plan], file: Path, gpus: int) -> None:
    from .plotting.drawing import picture as draw_picture
    from .plotting.plot import Plot, point

    lines: dict[str, list[object]] = {}
    for made in sorted(plans, key=lambda each: each.choice.actors):
        x = float(gpus - made.choice.learner)
        lines.setdefault(made.choice.mode, []).append(point(x, [made.outcome.samples_per_second]))
    best = plans[0].choice
    title = f"{gpus} GPUs do most with {gpus - best.learner} for actors, {best.mode}"
    across, up = "GPUs for actors; the learner has the rest", "samples per second, simulated"
    draw_picture(Plot("against", title, {"": lines}, across, up), file)


if __name__ == "__main__":
    sys.exit(main())
