"""Plan a cluster: `areal-like plan CONFIG [key=value ...] --gpus 64 [--costs FILE] [--target tokens_per_second]`.

Searches over simulations with the production scheduler (`areal-like simulate`): splits of the GPUs between actors and
learner, sync and async with several bounds, slots, train steps between weights, tail batching. Prints the best
plans and the best sync one, and writes a config of the first.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from areal_like.config import run_config as configs
from areal_like.config.registry import knobs
from areal_like.config.run_config import Config
from areal_like.errors import UserError

from .console.arguments import bound, command, interrupted, limit, new_file, positive, refuse
from .console.output import console, table, write_json
from .simulate import FAILURES, add_costs, costs_of
from .simulation.planning import Choice, Plan, Planner

TARGETS = ("samples_per_second", "tokens_per_second")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command("plan", __doc__)
    parser.add_argument("config", help="YAML file, or name of a shipped config")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, applied last")
    parser.add_argument("--gpus", type=positive, required=True, help="total number of GPUs")
    add_costs(parser)
    parser.add_argument("--target", choices=TARGETS, default=TARGETS[0], help=f"maximised rate (default: {TARGETS[0]})")
    parser.add_argument(
        "--most-stale", type=limit, default=math.inf, metavar="N", help="largest mean staleness, in train steps"
    )
    parser.add_argument(
        "--staleness", type=bound, nargs="+", default=[1, 4, 8], metavar="N", help="bounds (default: 1 4 8)"
    )
    parser.add_argument("--steps", type=positive, default=12, metavar="N", help="least train steps (default: 12)")
    parser.add_argument("--best", type=positive, default=5, metavar="N", help="number of plans to print (default: 5)")
    parser.add_argument("--out", type=new_file, metavar="FILE", help="write the config of the best plan here")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures of all plans here")
    return parser.parse_intermixed_args(argv)


def planned(args: argparse.Namespace) -> tuple[Planner, list[Plan]]:
    """The plans to show: the best, and the best sync one. Raises UserError where there is none."""
    out = console()

    def load(overrides: Sequence[str]) -> Config:
        return configs.load([args.config, *args.overrides, f"run.steps={args.steps}", *overrides])

    planner = Planner(
        load,
        costs_of(load([]), args),
        lambda plan: float(plan.figures[args.target]),
        lambda plan: bool(plan.figures["lag_mean"] <= args.most_stale),
        lambda text: out.print(text, soft_wrap=True),
    )
    planner.search(args.gpus, args.gpus_per_actor, args.staleness)
    if not (best := planner.best()):
        raise UserError(
            f"no plan is allowed by --most-stale, or none could be simulated: {[*planner.left_out.values()]}"
        )
    sync = [plan for plan in best if plan.choice.bound is None][:1]
    shown = planner.again([*best[: args.best], *(plan for plan in sync if plan not in best[: args.best])])
    return planner, shown


def recommended(args: argparse.Namespace, choice: Choice, config: Config) -> str:
    """A config that extends the planned one."""
    from omegaconf import OmegaConf

    name = str(Path(args.config).resolve()) if Path(args.config).suffix else args.config
    ranks = [f"learner.ranks={choice.learner}"] if "ranks" in knobs("learner", config.learner.name) else []
    keys = OmegaConf.from_dotlist([*args.overrides, *choice.overrides(config), *ranks])
    return f"extends: {name}\n{OmegaConf.to_yaml(keys)}"


def _main(args: argparse.Namespace) -> None:
    planner, shown = planned(args)
    names = ("GPUs", "mode", "weights every", "slots", "samples/s", "tokens/s", "staleness", "max", "idle")
    rows = table(f"best plans for {args.gpus} GPUs by {args.target}", *names)
    for plan in shown:
        figures, choice = plan.figures, plan.choice
        rows.add_row(
            f"{choice.actors * choice.each} + {choice.learner}",
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
    if args.out:
        args.out.write_text(recommended(args, shown[0].choice, planner.config))
    write_json(args.json, [plan.figures for plan in [*shown, *(each for each in planner.best() if each not in shown)]])


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        _main(args)
    except KeyboardInterrupt:
        return interrupted("nothing is kept")
    except FAILURES as error:
        refuse(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
