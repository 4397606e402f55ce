"""Compare runs in the terminal: `python -m scripts.compare RUN RUN ... [--plot FILE] [--json FILE]`.

Shows the keys of the config that differ, the reward's curve, and a table with a row per setting. Runs that differ only
in the seed share a row. With five seeds or more it has 95 % intervals of the mean, with fewer the range. The folder of
an ablation stands for its runs. `python -m scripts.report RUN RUN ...` shows the same and more, in the browser.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from areal_like.errors import UserError
from areal_like.run.metrics import MetricsFollower
from areal_like.run.run_folder import summary_of

from .console.arguments import command, new_file, picture, refuse
from .console.output import console, shortened, table, visible, write_json
from .console.sparkline import sparkline

if TYPE_CHECKING:
    from .reporting.several import Member

REWARD = "reward/mean"
MOST_NAMES = 8
"""Most runs whose names are shown, per setting."""
CURVE = 24
"""Characters of a curve in the table."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command("compare", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run folder, or a folder of an ablation")
    parser.add_argument(
        "--plot",
        type=picture,
        metavar="FILE",
        help="draw the curves of the reward: means, runs, and intervals of five runs or more",
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the table to this file")
    return parser.parse_args(argv)


def curve(run: Path) -> tuple[list[float], list[float]]:
    """Train steps and mean rewards of their batches."""
    rows = [row for row in MetricsFollower(run / "metrics.jsonl").each_new_row() if row.get(REWARD) is not None]
    return [row["step"] for row in rows], [row[REWARD] for row in rows]


def named(labels: Mapping[str, str]) -> str:
    """A setting in words."""
    return ", ".join(f"{key}={value}" for key, value in labels.items()) or "all runs"


def told(measure: Mapping[str, Any]) -> str:
    """`0.93 [0.90, 0.95]`."""
    if measure["mean"] is None:
        return "-"
    spread = f" [{measure['low']:.4g}, {measure['high']:.4g}]" if measure["count"] > 1 else ""
    return f"{measure['mean']:.4g}{spread}"


def compare(members: Sequence[Member]) -> list[dict[str, Any]]:
    """A row per setting: labels, all that differs, runs, measures, and the runs' folders and curves."""
    from .reporting import several

    rows = several.table(members, [several.measured(each, summary_of(each.run) or {}) for each in members])
    for row in rows:
        its = [each for each in members if each.labels == row["labels"]]
        row["folders"], row["curves"] = [str(each.run) for each in its], [curve(each.run) for each in its]
        row["differs"] = its[0].differs or its[0].labels
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    out = console()
    for number, row in enumerate(rows, 1):
        names = [visible(Path(folder).resolve().name) for folder in row["folders"]]
        out.print(
            Text(f"{number}: {', '.join(names[:MOST_NAMES])}{' ...' * (len(names) > MOST_NAMES)}"), soft_wrap=True
        )
    if keys := list(rows[0]["differs"]):
        differ = table("what differs", "", *(str(number) for number in range(1, len(rows) + 1)))
        for key in keys:
            differ.add_row(key, *(visible(shortened(str(row["differs"][key]), 24)) for row in rows))
        out.print(differ)
    measures = list(dict.fromkeys(name for row in rows for name in row["measures"]))
    found = table("", "setting", "runs", *measures, "reward of batches")
    for column in found.columns[2:-1]:
        column.no_wrap = False  # a long name in two lines, rather than half of it
    for number, row in enumerate(rows, 1):
        values = [told(row["measures"][name]) if name in row["measures"] else "-" for name in measures]
        line = sparkline(row["curves"][0][1], CURVE)
        found.add_row(str(number), str(row["runs"]), *values, line)
    out.print(found)
    out.print(Text("[low, high]: 95 % interval of the mean of five runs or more, else the range", "dim"))


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The curves that have points; one panel."""
    from .plotting import plot
    from .plotting.drawing import picture

    found = {named(row["labels"]): [plot.curve(*each) for each in row["curves"] if each[0]] for row in rows}
    panel = {name: curves for name, curves in found.items() if curves}
    drawn = plot.Plot(
        "curves", "Reward of the batches", {"": panel}, x="train step", y="mean reward", replicates="runs"
    )
    picture(drawn, path)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    from .reporting.several import members

    try:
        rows = compare(members(args.runs))
        if args.plot:
            draw(args.plot, rows)
    except (ValueError, OSError, UserError) as error:
        refuse(error)
    show(rows)
    write_json(args.json, [{key: value for key, value in row.items() if key != "curves"} for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
