"""Fit the costs of a simulation to a run: `python -m scripts.calibrate RUN [--steps N] [--out costs.yaml]`.

Reads what a run of 5 to 20 train steps measured: decode steps by number of sequences and tokens, prefill, train steps,
weights, verifiers, lengths of answers. Writes a file for `python -m scripts.simulate CONFIG --costs costs.yaml`, with
the residuals of its fits.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from areal_like.config.run_config import ConfigError
from areal_like.errors import UserError

from .console.arguments import as_called, command, new_file, positive, refuse
from .console.output import console
from .simulation.calibration import calibrate, written


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command("calibrate", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--steps", type=positive, metavar="N", help="only the first N train steps (default: all)")
    parser.add_argument("--out", type=new_file, default=Path("costs.yaml"), metavar="FILE", help="default: costs.yaml")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        found = calibrate(args.run, args.steps)
    except (ConfigError, UserError, OSError, ValueError) as error:
        refuse(error)
    args.out.write_text(written(found))
    out = console()
    out.print(written(found, short=True), soft_wrap=True)
    out.print(as_called(f"written to {args.out}; now: python -m scripts.simulate CONFIG --costs {args.out}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
