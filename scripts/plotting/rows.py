"""A number for each of several things: a row per thing, a panel per condition, a dot with its interval.

If each panel compares two (`plot.Plot.panels` has two labels), a line joins them. A label marks what is at least
`ratio` times the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..analysis.intervals import FEWEST_FOR_INTERVALS
from .canvas import FAINT, LABEL, SMALL, canvas, colours, columns_of, ink, logarithmic, name_panel, plain
from .lines import said
from .plot import Plot, Point

ROW, MARGIN = 0.185, 0.75
"""Inches: of a row; of a panel's title and axis."""
APART = 0.17
"""Rows between the dots of two that are compared."""
MOST_TIMES = 100.0
"""Above this ratio the smaller number is too near to 0 for an exact ratio."""


def draw(plot: Plot) -> Any:
    names = list(dict.fromkeys(str(p.x) for panel in plot.panels.values() for items in panel.values() for p in items))
    columns = min(3, columns_of(len(plot.panels)))
    lines = math.ceil(len(plot.panels) / columns)
    figure = canvas(plot, lines * (ROW * len(names) + MARGIN), _said(plot))
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
    alone = len(plot.lines()) == 1
    colour_of = colours(names if alone else plot.lines())
    for number, (title, panel) in enumerate(plot.panels.items()):
        _panel(axes[number], plot, panel, names, colour_of)
        others = list(panel)[1:]
        name_panel(axes[number], title, colour_of[others[0]] if others else None)
        axes[number].tick_params(labelleft=number % columns == 0, labelbottom=number + columns >= len(plot.panels))
    for spare in axes[len(plot.panels) :]:
        spare.remove()
    first = axes[0]
    first.set_yticks(range(len(names)), names)
    first.set_ylim(len(names) - 0.4, -0.6 if alone else -1.2)
    _scale(first, plot)
    return figure


def _scale(axis: Any, plot: Plot) -> None:
    means = [p.estimate.mean for panel in plot.panels.values() for items in panel.values() for p in items]
    known = [mean for mean in means if not math.isnan(mean)]
    if plot.log and any(mean > 0 for mean in known):
        axis.set_xscale("log")
        axis.set_xlim(left=min(mean for mean in known if mean > 0) / 2)
        logarithmic(axis.xaxis)
    elif known and min(known) >= 0:
        axis.set_xlim(left=0)


def _panel(
    axis: Any, plot: Plot, panel: Mapping[str, Sequence[Point]], names: Sequence[str], colour_of: Mapping[str, str]
) -> None:
    plain(axis)
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", color="#ececec", linewidth=0.6)
    axis.tick_params(axis="y", length=0)
    for row in range(1, len(names), 2):
        axis.axhspan(row - 0.5, row + 0.5, color="#f7f7f7", zorder=-1)
    for number, (label, items) in enumerate(panel.items()):
        shift = (number - (len(panel) - 1) / 2) * 2 * APART if len(panel) > 1 else 0.0
        for each in items:
            colour = colour_of[label] if label in colour_of else colour_of[str(each.x)]
            _dot(axis, each, names.index(str(each.x)) + shift, colour, plot)
    if len(panel) == 2:
        _compare(axis, plot, panel, names, colour_of)


def _dot(axis: Any, each: Point, y: float, colour: str, plot: Plot) -> None:
    found = each.estimate
    if not found.count:
        return
    if len(each.values) > 1:
        axis.plot(each.values, np.full(len(each.values), y), "o", color=colour, markersize=1.8, alpha=0.45)
    if found.count >= FEWEST_FOR_INTERVALS and not math.isnan(found.low):
        low = max(found.low, 1e-9) if plot.log else found.low  # a logarithm has no 0: the line leaves the picture
        axis.hlines(y, low, found.high, color=colour, linewidth=1.1, alpha=0.8)
    axis.plot([found.mean], [y], "o", color=colour, markersize=4.0, zorder=3)


def _compare(
    axis: Any, plot: Plot, panel: Mapping[str, Sequence[Point]], names: Sequence[str], colour_of: Mapping[str, str]
) -> None:
    """Labels above the dots of the first row, and ratios to the first of `plot.ratio` or more."""
    (first, base), (second, others) = panel.items()
    of = {str(p.x): p.estimate.mean for p in base}
    for each in others:
        row, mean, reference = names.index(str(each.x)), each.estimate.mean, of.get(str(each.x), math.nan)
        if plot.ratio and reference > 0 and mean / reference >= plot.ratio:
            end = max(each.estimate.high if each.estimate.count >= FEWEST_FOR_INTERVALS else mean, mean)
            axis.annotate(
                _times(mean / reference), (end, row + APART), (3, 0), textcoords="offset points", va="center",
                fontsize=SMALL, fontweight="bold", color=ink(colour_of[second]), annotation_clip=False,
            )  # fmt: skip
            axis.plot([reference, mean], [row - APART, row + APART], color=colour_of[second], linewidth=0.8)
        elif not math.isnan(reference):
            axis.plot([reference, mean], [row - APART, row + APART], color=FAINT, linewidth=0.8, zorder=0)
    at = {
        first: of.get(names[0], math.nan),
        second: {str(p.x): p.estimate.mean for p in others}.get(names[0], math.nan),
    }
    right = max(at, key=lambda label: at[label])
    for label, x in at.items():
        if not math.isnan(x):
            side = {"ha": "left" if label == right else "right", "va": "center", "fontsize": SMALL, "gid": LABEL}
            axis.text(x, -0.8, label, color=ink(colour_of[label]), **side)


def _times(ratio: float) -> str:
    return f"{ratio:.0f} ×" if ratio < MOST_TIMES else f"> {MOST_TIMES:.0f} ×"


def _said(plot: Plot) -> str:
    from .lines import Line

    empty = np.empty(0)
    lines = []
    for panel in plot.panels.values():
        for p in (p for items in panel.values() for p in items):
            seeds = [(empty, empty)] if len(p.values) > 1 else []
            lines.append(Line(empty, empty, np.array([p.estimate.low]), empty, seeds, p.estimate.count))
    return said(plot, lines, bands=True)
