"""Simulate a run in virtual time: `areal-like simulate CONFIG [key=value ...] [--costs FILE | --costs-from RUN]`.

The buffer is the production code; actors and learner are modelled. Costs come from a file, from a fit to a run of 50
train steps or more (`--costs-from`), or from the config where engine and learner are timed.
"""

import argparse
import sys
from pathlib import Path

from areal_like.config import run_config as configs
from areal_like.config.run_config import Config
from buffer.checks import RolloutsFail

from .console.arguments import command, json_file, new_file, refusing
from .console.output import console, table, write_json
from .simulation import costs
from .simulation.costs import Costs
from .simulation.run import SHARES, Simulation, difference, figures_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a yaml file, or the name of a shipped one")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="dotted overrides, applied last")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--costs", type=Path, metavar="FILE", help="costs in YAML (default: those of timed parts)")
    source.add_argument("--costs-from", type=Path, metavar="RUN", help="run folder to fit the costs to")


def costs_of(config: Config, args: argparse.Namespace) -> Costs:
    """Raises ConfigError."""
    if not (args.costs or args.costs_from):
        return costs.of_timed(config)
    return costs.as_configured(config, costs.read(args.costs) if args.costs else costs.fitted(args.costs_from))


def show(found: dict[str, float], measured: dict[str, float]) -> None:
    rows = table("", "", "simulated", *(["measured", "error"] if measured else []))
    for name, value in found.items():
        both = [value, measured[name]] if measured else [value]
        cells = [format(each, ".1%" if name in SHARES else ".4g") for each in both]
        rows.add_row(name, *cells, *([f"{difference(name, *both):+.1%}"] if measured else []))
    console().print(rows)


def main(argv: list[str] | None = None) -> int:
    parser = command("simulate", __doc__)
    add_arguments(parser)
    parser.add_argument("--against", type=Path, metavar="RUN", help="run folder to compare with")
    parser.add_argument("--write-costs", type=new_file, metavar="FILE", help="file for the costs")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="file for the figures (-: standard output)")
    args = parser.parse_intermixed_args(argv)
    with refusing(RolloutsFail):
        config = configs.load([args.config, *args.overrides])
        cost = costs_of(config, args)
        measured = figures_of(args.against) if args.against else {}
        found = Simulation(config, cost).run().figures
    if args.json != Path("-"):
        console().print(f"costs: {cost.source}", soft_wrap=True)
        show(found, measured)
    if args.write_costs:
        args.write_costs.write_text(costs.written(cost), encoding="utf-8")
    write_json(args.json, {"simulated": found, "measured": measured})
    return 0


if __name__ == "__main__":
    sys.exit(main())
