"""A run as one HTML page: `python -m scripts.report RUN [RUN ...] [--out FILE]`.

The page opens from disk, without a network: reward beside what the model wrote, staleness, who waited for whom,
throughput, the ledger, diagnostics of the loss by staleness, weight updates, samples token by token, and the config.
Several runs, or the folder of an ablation, are compared first. It takes at most about 10 MB, however long the runs
were: curves are drawn from buckets with mean, lowest and highest value.

`python -m scripts.watch RUN` serves the page of a live run.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .console.arguments import command, new_file, refuse

NAME = "report.html"
MOST_BYTES = 3_500_000
"""Most bytes of data; the plotting library takes 4.8 MB."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command("report", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run folder, or a folder of an ablation")
    parser.add_argument("--out", type=new_file, help=f"the file (default: {NAME} in the folder; of several: here)")
    return parser.parse_args(argv)


class Report:
    """The data of the page for some folders. `read` reads what is new. Raises ConfigError, OSError."""

    def __init__(self, paths: Sequence[Path], live: bool = False):
        from .reporting.contents import Budget, Contents
        from .reporting.several import members

        self.members, self.live = members(paths), live
        budget = Budget.of(MOST_BYTES, len(self.members))
        self.contents = [Contents(each.run, budget, each.labels, each.seed) for each in self.members]
        names = [path.resolve().name for path in paths]
        self.title = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def read(self) -> dict[str, Any]:
        from .reporting.several import changes, measured, table

        for each in self.contents:
            each.refresh()
        runs = [each.data() for each in self.contents]
        pairs = list(zip(self.members, self.contents, strict=True))
        names = Counter(run["name"] for run in runs)
        for run, (member, content) in zip(runs, pairs, strict=True):
            run["measures"] = measured(member, content.summary)
            if names[run["name"]] > 1:  # with the parent folder the names are unique
                run["name"] = "/".join(member.run.resolve().parts[-2:])
        for run in runs[1:]:
            run["config"] = changes(runs[0]["config"], run["config"])
        points = table(self.members, [run["measures"] for run in runs]) if len(runs) > 1 else []
        return {"title": self.title, "live": self.live, "runs": runs, "points": points}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    from areal_like.errors import UserError

    from .reporting.page import page

    out = args.out or (args.runs[0] / NAME if len(args.runs) == 1 else Path(NAME))
    try:
        report = Report(args.runs)
        data = report.read()
        made = page(data, report.title)
        try:
            out.write_text(made, encoding="utf-8", errors="replace")
        except OSError as error:
            refuse(f"{out} cannot be written: {error.strerror}; name another file with --out")
    except (ValueError, OSError, UserError) as error:
        refuse(error)
    count = len(data["runs"])
    print(f"{out}: {count} run{'s' * (count > 1)}, {out.stat().st_size / 1e6:.1f} MB; open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
