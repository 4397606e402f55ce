"""Lines: learning curves, and a number against a key of the grid.

A single panel with many lines becomes several: first the means together, and below them each line alone with its seeds
and its interval, the others in grey.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..analysis.intervals import FEWEST_FOR_INTERVALS, band
from .canvas import FAINT, canvas, colours, columns_of, label_ends, logarithmic, name_panel, plain
from .plot import Curve, Plot, Point

MOST_TOGETHER = 3
"""Lines of a panel that shows their intervals without hiding one behind another."""
MOST_TICKS = 5
"""Numbers below a small panel."""
LEAST_FOR_LOG = 8.0
"""The x axis is logarithmic from this ratio of the largest to the smallest positive x on."""


@dataclass(frozen=True, slots=True)
class Line:
    """`x`, `mean`, `low`, `high`: [points]; `seeds`: x and y of what is drawn for single seeds; `count` of them."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: list[tuple[np.ndarray, np.ndarray]]
    count: int

    @property
    def has_interval(self) -> bool:
        return self.count >= FEWEST_FOR_INTERVALS and bool(np.isfinite(self.low).any())


def line_of_curves(curves: Sequence[Curve]) -> Line:
    found = band(curves)
    seeds = [(np.asarray(x), np.asarray(y)) for x, y in curves] if len(curves) > 1 else []
    return Line(found.x, found.mean, found.low, found.high, seeds, len(curves))


def line_of_points(points: Sequence[Point], place: Mapping[float, float]) -> Line:
    known = [each for each in points if each.estimate.count]
    x = np.array([place[float(each.x)] for each in known])
    mean, low, high = (np.array([getattr(p.estimate, name) for p in known]) for name in ("mean", "low", "high"))
    seeds = [(np.full(len(each.values), at), np.array(each.values)) for each, at in zip(known, x, strict=True)]
    count = min((each.estimate.count for each in known), default=0)
    return Line(x, mean, low, high, [pair for pair in seeds if len(pair[0]) > 1], count)


def places(numbers: Iterable[float], even: bool = False) -> dict[float, float]:
    """Positions of numbers on the axis: the numbers themselves; their logarithms if they span much (with room for 0);
    or equal distances."""
    known = sorted(set(numbers))
    positive = [number for number in known if number > 0]
    if even:
        return {number: float(place) for place, number in enumerate(known)}
    if known[0] < 0 or not positive or positive[-1] / positive[0] < LEAST_FOR_LOG:
        return {number: number for number in known}
    room = max(1.0, math.log2(positive[-1] / positive[0]) / 8)
    return {number: math.log2(number / positive[0]) if number > 0 else -room for number in known}


def draw(plot: Plot) -> Any:
    place = {} if plot.kind == "curves" else places(_numbers(plot), plot.even)
    panels = {
        title: {label: _line(items, place) for label, items in panel.items() if items}
        for title, panel in plot.panels.items()
    }
    panels = {title: {label: line for label, line in panel.items() if len(line.x)} for title, panel in panels.items()}
    apart = len(panels) == 1 and len(next(iter(panels.values()))) > MOST_TOGETHER
    return _apart(plot, next(iter(panels.values())), place) if apart else _together(plot, panels, place)


def _numbers(plot: Plot) -> list[float]:
    return [float(p.x) for panel in plot.panels.values() for items in panel.values() for p in items] or [0.0]


def _line(items: Sequence[Any], place: Mapping[float, float]) -> Line:
    return line_of_points(items, place) if isinstance(items[0], Point) else line_of_curves(items)


# Layout


def _together(plot: Plot, panels: Mapping[str, Mapping[str, Line]], place: Mapping[float, float]) -> Any:
    """A panel per title, with all of its lines; labels are beside the last panel of each row."""
    panels = {title: _beside(panel, place) for title, panel in panels.items()}
    columns = min(3, columns_of(len(panels)))
    rows = math.ceil(len(panels) / columns)
    crowded = any(len(panel) > MOST_TOGETHER for panel in panels.values())
    lines = [line for panel in panels.values() for line in panel.values()]
    figure = canvas(plot, 3.3 if rows == 1 else 1.75 * rows, said(plot, lines, bands=not crowded))
    axes = _axes(figure, rows, columns, len(panels))
    colour_of = colours(plot.lines())
    for axis, (title, panel) in zip(axes, panels.items(), strict=True):
        for label, line in panel.items():
            _detail(axis, plot, line, colour_of[label], banded=not crowded)
        name_panel(axis, title)
        _ticks(axis, place, MOST_TICKS if columns > 1 else 12)
    _scale(axes, plot, lines)
    ends = [(axis, _ends(panel)) for axis, panel in zip(axes, panels.values(), strict=True)]
    last_of_rows = [end for number, end in enumerate(ends, 1) if number % columns == 0 or number == len(ends)]
    label_ends(figure, last_of_rows, colour_of, columns)
    return figure


def _apart(plot: Plot, lines: Mapping[str, Line], place: Mapping[float, float]) -> Any:
    """The means together, and below them a panel per line."""
    detailed = any(line.has_interval or line.seeds for line in lines.values())
    columns = columns_of(len(lines))
    rows = math.ceil(len(lines) / columns) if detailed else 0
    figure = canvas(plot, 2.7 + 1.35 * rows, said(plot, lines.values(), bands=True, apart=True))
    colour_of = colours(lines)
    grid = figure.add_gridspec(1 + rows, columns, height_ratios=[2.5, *[1.3] * rows])
    whole = figure.add_subplot(grid[0, :])
    axes = [whole]
    for label, line in lines.items():
        _mean(whole, plot, line, colour_of[label])
    for number, (label, line) in enumerate(lines.items()) if detailed else ():
        row, column = divmod(number, columns)
        axis = figure.add_subplot(grid[1 + row, column], sharex=axes[1] if number else None, sharey=whole)
        axes.append(axis)
        for other in lines.values():
            axis.plot(other.x, other.mean, color=FAINT, linewidth=0.8)
        _detail(axis, plot, line, colour_of[label], banded=True)
        name_panel(axis, label, colour_of[label])
        _inner(axis, column == 0, number + columns >= len(lines))
    for axis in axes:
        plain(axis)
        _ticks(axis, place, 12 if axis is whole else MOST_TICKS)
    _scale(axes, plot, lines.values())
    label_ends(figure, [(whole, _ends(lines))], colour_of, columns)
    return figure


def _axes(figure: Any, rows: int, columns: int, count: int) -> list[Any]:
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
    for number, axis in enumerate(axes):
        if number >= count:
            axis.remove()
            continue
        plain(axis)
        _inner(axis, number % columns == 0, number + columns >= count)
    return axes[:count]


def _inner(axis: Any, leftmost: bool, lowest: bool) -> None:
    """Numbers at the outer axes only, because all panels share them."""
    axis.tick_params(labelleft=leftmost, labelbottom=lowest)


def _ticks(axis: Any, place: Mapping[float, float], most: int) -> None:
    if not place:
        axis.locator_params(axis="x", nbins=6 if most > MOST_TICKS else 3)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
        return
    numbers = list(place)
    every = max(1, math.ceil(len(numbers) / most))
    shown = {numbers[i] for i in range(len(numbers) - 1, -1, -every)}
    names = [f"{number:,.6g}" if number in shown else "" for number in numbers]
    axis.set_xticks([place[number] for number in numbers], names)


def _scale(axes: Sequence[Any], plot: Plot, lines: Iterable[Line]) -> None:
    """Shared by all panels. A linear axis begins at 0 if no value is negative, so that lengths can be compared."""
    first = axes[0]
    if plot.log:
        first.set_yscale("log")
        logarithmic(first.yaxis)
    elif all(np.nanmin(line.mean) >= 0 for line in lines):
        highest = first.get_ylim()[1]
        first.set_ylim(0, 1.03 if 0.9 < highest <= 1.12 else highest)
    for axis in axes:
        axis.margins(x=0.03)


def _ends(panel: Mapping[str, Line]) -> dict[str, tuple[float, float]]:
    return {label: (float(line.x[-1]), float(line.mean[-1])) for label, line in panel.items()}


def _beside(panel: Mapping[str, Line], place: Mapping[float, float]) -> dict[str, Line]:
    """Lines with intervals, each a little to the side: those at the same x are drawn side by side."""
    by = 0.012 * (max(place.values()) - min(place.values())) if place else 0.0
    shifts = {label: by * (number - (len(panel) - 1) / 2) for number, label in enumerate(panel)}
    return {label: _shifted(line, shifts[label]) for label, line in panel.items()}


# What is drawn of a line


def _shifted(line: Line, by: float) -> Line:
    seeds = [(x + by, y) for x, y in line.seeds]
    return Line(line.x + by, line.mean, line.low, line.high, seeds, line.count)


def _mean(axis: Any, plot: Plot, line: Line, colour: str) -> None:
    marker = {"marker": "o", "markersize": 3.5} if plot.kind == "against" else {}
    axis.plot(line.x, line.mean, color=colour, linewidth=1.7, zorder=3, **marker)


def _detail(axis: Any, plot: Plot, line: Line, colour: str, banded: bool) -> None:
    """Mean, seeds, interval."""
    _mean(axis, plot, line, colour)
    for x, y in line.seeds:
        if plot.kind == "curves":
            axis.plot(x, y, color=colour, linewidth=0.5, alpha=0.45 if banded else 0.25)
        else:
            axis.plot(x, y, color=colour, linestyle="", marker="o", markersize=1.8, alpha=0.45)
    if not line.has_interval:
        return
    low = np.maximum(line.low, np.nanmin(line.mean) * 1e-3) if plot.log else line.low
    if plot.kind == "against":
        axis.vlines(line.x, low, line.high, color=colour, linewidth=1.0, alpha=0.8)
    elif banded:
        axis.fill_between(line.x, low, line.high, color=colour, alpha=0.15, linewidth=0)


def said(plot: Plot, lines: Iterable[Line], *, bands: bool, apart: bool = False) -> str:
    """Explains dots, thin lines, bars and bands to readers of the plot."""
    found = list(lines)
    counts = sorted({line.count for line in found if line.count})
    if not counts or counts == [1]:
        return ""
    count = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    text = [f"Means of {count} {plot.replicates}"]
    if any(line.seeds for line in found):
        text.append(f"{'thin lines' if plot.kind == 'curves' else 'small dots'}: single {plot.replicates}")
    if any(line.has_interval for line in found) and (plot.kind != "curves" or bands):
        text.append(f"{'shaded' if plot.kind == 'curves' else 'bars'}: 95 % interval of the mean")
    return "; ".join(text) + (" (in the lower panels)." if apart else ".")
