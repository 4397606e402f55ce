"""Who worked and who waited: `areal-like timeline RUN [--plot FILE]`.

Prints each process's share of time for each activity, and for waiting. `--plot` draws it. Works during a run, too.
It does not align the clocks of several hosts.

An actor generates, evaluates (held-out prompts), or has an update of its weights; a learner trains,
publishes, or writes a checkpoint. The rest is waiting: for another process, or for the disk. The time between a
run and its resume is left out. (A run's idle shares are others: docs/ablations.md defines them.)
"""

import math
from pathlib import Path

from rich.table import Table

from areal_like.run.spans import START, Span, read

from .console import output
from .console.arguments import command, picture, refusing

WAITS = "waits"
ACTIVITIES = {
    "generate": "#56B4E9",
    "evaluate": "#B8A9D9",
    "update": "#D55E00",
    "train": "#00694C",
    "publish": "#E69F00",
    "checkpoint": "#333333",
    WAITS: "#E8E8E8",
}
"""Name → colour, in the order in which they are drawn, each over the earlier ones; waiting is the ground."""
Timeline = dict[str, list[Span]]
"""Role → spans, in seconds since the first of them, in order."""


def timeline(run: Path, begin: float = 0.0, end: float = math.inf) -> Timeline:
    """The recorded spans of a run between two times; actors by number, then others. Raises ValueError without any."""
    every = read(run)
    starts = [span.begin for span in every.get("learner", []) if span.name == START]
    found = {role: worked for role, spans in every.items() if (worked := [s for s in spans if s.name != START])}
    if not found:
        raise ValueError(f"{run} has no spans: is this a run folder, and has the run started?")
    first, cut, gaps = min(spans[0].begin for spans in found.values()), Timeline(), gaps_before(starts, found)
    moved = lambda at: at - first - sum(min(stop, at) - start for start, stop in gaps if start < at)  # noqa: E731
    for role in sorted(found, key=lambda role: (not role.startswith("actor"), len(role), role)):
        parts = [Span(s.name, max(moved(s.begin), begin), min(moved(s.end), end)) for s in found[role]]
        cut[role] = [part for part in parts if part.end > part.begin]
    return cut


def gaps_before(starts: list[float], found: Timeline) -> list[tuple[float, float]]:
    """From the last work before each start of the run to this start."""
    worked = [(start, [s.end for spans in found.values() for s in spans if s.begin < start]) for start in starts]
    return [(max(ends), start) for start, ends in worked if ends and max(ends) < start]


def window(found: Timeline) -> tuple[float, float]:
    spans = [span for spans in found.values() for span in spans]
    return min((span.begin for span in spans), default=0.0), max((span.end for span in spans), default=0.0)


def shares(found: Timeline) -> dict[str, dict[str, float]]:
    """Role → activity → share of the time between the first begin and the last end; `waits`: in no span at all."""
    begin, end = window(found)
    total, table = max(end - begin, 1e-9), {}
    for role, spans in found.items():
        row = {name: sum(s.end - s.begin for s in spans if s.name == name) / total for name in {s.name for s in spans}}
        covered, until = 0.0, -math.inf
        for span in spans:  # ordered by their begin; they may overlap
            covered += max(0.0, span.end - max(span.begin, until))
            until = max(until, span.end)
        table[role] = row | {WAITS: 1.0 - covered / total}
    return table


def draw(runs: dict[str, Timeline], path: Path, title: str) -> None:
    """A panel per run, a row per process, a colour per activity; grey: it waits. Raises OSError."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [len(found) for found in runs.values()]
    figure = Figure(figsize=(9, 0.25 * sum(rows) + 0.5 * len(rows) + 1), dpi=150, layout="constrained")
    axes = figure.subplots(len(rows), sharex=True, squeeze=False, height_ratios=rows).flatten()
    for axis, (name, found) in zip(axes, runs.items(), strict=True):
        begin, end = window(found)
        for place, spans in enumerate(found.values()):
            axis.broken_barh([(begin, end - begin)], (place - 0.4, 0.8), color=ACTIVITIES[WAITS])
            for activity, colour in ACTIVITIES.items():
                bars = [(span.begin, span.end - span.begin) for span in spans if span.name == activity]
                axis.broken_barh(bars, (place - 0.4, 0.8), color=colour, linewidth=0)
        axis.set_title(name, loc="left", fontsize=9)
        axis.set_yticks(range(len(found)), list(found), fontsize=8)
        axis.set(xlim=(begin, end), ylim=(len(found) - 0.5, -0.5))
    axes[-1].set_xlabel("seconds")
    figure.suptitle(title)
    present = {name for found in runs.values() for row in shares(found).values() for name in row}
    patches = [Patch(color=colour, label=name) for name, colour in ACTIVITIES.items() if name in present]
    figure.legend(handles=patches, loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path)


def table(found: Timeline) -> Table:
    names = [name for name in ACTIVITIES if any(span.name == name for spans in found.values() for span in spans)]
    begin, end = window(found)
    made = output.table(f"{end - begin:.1f} s: share of the time", "", *names, WAITS)
    for role, row in shares(found).items():
        made.add_row(role, *(f"{row[name]:.0%}" if name in row else "" for name in (*names, WAITS)))
    return made


def main() -> None:
    parser = command("timeline", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="file for a picture (png, pdf, svg)")
    args = parser.parse_args()
    with refusing():
        found = timeline(args.run)
    output.console().print(table(found))
    if args.plot:
        draw({args.run.name: found}, args.plot, "Who worked and who waited")
        print(f"timeline: {args.plot}")


if __name__ == "__main__":
    main()
