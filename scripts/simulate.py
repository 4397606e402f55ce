"""Simulate a run in virtual time: `areal-like simulate CONFIG [key=value ...] [--costs FILE | --costs-from RUN]`.

The buffer is the production code; actors and learner are modelled. Costs come from a file, from a fit to a run of 50
train steps or more (`--costs-from`), or from the config where engine and learner are timed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from areal_like.config import run_config as configs
from areal_like.config.run_config import Config, ConfigError
from areal_like.errors import UserError
from areal_like.wire.link import BusError
from buffer.checks import RolloutsFail

from .console.arguments import command, interrupted, json_file, new_file, refuse
from .console.output import console, table, write_json
from .simulation import costs
from .simulation.calibration import fitted, written
from .simulation.costs import Costs
from .simulation.run import SHARES, Simulation, Stuck, difference, figures_of

FAILURES = (BusError, ConfigError, UserError, OSError, ValueError, RolloutsFail, Stuck)


def add_costs(parser: argparse.ArgumentParser) -> None:
    """The options that name costs."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--costs", type=Path, metavar="FILE", help="costs in YAML (default: those of timed parts)")
    source.add_argument("--costs-from", type=Path, metavar="RUN", help="fit the costs to this run's folder")


def costs_of(config: Config, args: argparse.Namespace) -> Costs:
    """Raises ConfigError."""
    if args.costs_from:
        found = fitted(args.costs_from)
    elif args.costs:
        found = costs.read(args.costs)
    else:
        return costs.of_timed(config)
    return costs.as_configured(config, found)


def shown(name: str, value: float) -> str:
    return f"{value:.1%}" if name in SHARES else f"{value:.4g}"


def show(found: dict[str, float], measured: dict[str, float]) -> None:
    rows = table("", "", "simulated", *(["measured", "error"] if measured else []))
    for name, value in found.items():
        words = [shown(name, value)]
        if measured:
            words += [shown(name, measured[name]), f"{difference(name, value, measured[name]):+.1%}"]
        rows.add_row(name, *words)
    console().print(rows)


def main(argv: list[str] | None = None) -> int:
    parser = command("simulate", __doc__)
    parser.add_argument("config", help="YAML file, or name of a shipped config")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, applied last")
    add_costs(parser)
    parser.add_argument("--against", type=Path, metavar="RUN", help="folder of a real run to compare with")
    parser.add_argument("--write-costs", type=new_file, metavar="FILE", help="write the costs to this file")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="write the figures here (-: standard output)")
    args = parser.parse_intermixed_args(argv)
    try:
        config = configs.load([args.config, *args.overrides])
        cost = costs_of(config, args)
        measured = figures_of(args.against) if args.against else {}
        found = Simulation(config, cost).run().figures
    except KeyboardInterrupt:
        return interrupted("nothing is kept")
    except FAILURES as error:
        refuse(error)
    if args.json != Path("-"):
        console().print(f"costs: {cost.source}", soft_wrap=True)
        show(found, measured)
    if args.write_costs:
        args.write_costs.write_text(written(cost))
    write_json(args.json, {"simulated": found, "measured": measured})
    return 0


if __name__ == "__main__":
    sys.exit(main())
