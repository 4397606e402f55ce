"""A run as one HTML page: `areal-like report RUN [--out FILE]`.

The page opens from disk, without a network: reward beside what the model wrote, staleness, who waited for whom,
throughput, the ledger, diagnostics of the loss by staleness, weight updates, samples token by token, and the config.
It takes at most about 10 MB, however long the run was: curves are drawn from buckets with mean, lowest and highest
value. Write it again during a run to see what is new. `areal-like compare` compares several runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .console.arguments import command, new_file, refuse

NAME = "report.html"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command("report", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--out", type=new_file, metavar="FILE", help=f"the page (default: RUN/{NAME})")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    from areal_like.errors import UserError

    from .reporting.contents import contents
    from .reporting.page import page

    out = args.out or args.run / NAME
    try:
        made = page(contents(args.run), args.run.resolve().name)
        out.write_text(made, encoding="utf-8", errors="replace")
    except (ValueError, OSError, UserError) as error:
        refuse(error)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB; open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
