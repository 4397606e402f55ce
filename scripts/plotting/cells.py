"""A number for each of several things at each of several places: a coloured cell with its mean and interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..analysis.intervals import FEWEST_FOR_INTERVALS
from .canvas import canvas, columns_of, name_panel
from .lines import places
from .plot import Plot, Point

ROW, MARGIN = 0.3, 0.55
"""Inches: of a row of cells; of a panel's title and axis."""
BEST = "bold: the best of its column, and all whose interval reaches that mean"


def draw(plot: Plot) -> Any:
    """All panels share the colours, from the least to the largest mean. Numbers on the x axis have equal distances."""
    names = plot.lines()
    spots = places((float(p.x) for panel in plot.panels.values() for items in panel.values() for p in items), even=True)
    columns = min(3, columns_of(len(plot.panels)))
    lines = math.ceil(len(plot.panels) / columns)
    figure = canvas(plot, lines * (ROW * len(names) + MARGIN), _said(plot))
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
    means = [p.estimate.mean for panel in plot.panels.values() for items in panel.values() for p in items]
    low, high = float(np.nanmin(means)), float(np.nanmax(means))
    for number, (title, panel) in enumerate(plot.panels.items()):
        axis = axes[number]
        _panel(axis, panel, names, spots, (low, high))
        name_panel(axis, title)
        axis.tick_params(length=0, labelleft=number % columns == 0, labelbottom=number + columns >= len(plot.panels))
        axis.spines[:].set_visible(False)
    for spare in axes[len(plot.panels) :]:
        spare.remove()
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_xticks(list(spots.values()), [f"{number:,.6g}" for number in spots])
    return figure


def _panel(
    axis: Any,
    panel: Mapping[str, Sequence[Point]],
    names: Sequence[str],
    spots: Mapping[float, float],
    span: tuple[float, float],
) -> None:
    means = np.full((len(names), len(spots)), np.nan)
    cells = {(names.index(n), int(spots[float(p.x)])): p.estimate for n, items in panel.items() for p in items}
    for (row, column), estimate in cells.items():
        means[row, column] = estimate.mean
    axis.imshow(means, vmin=span[0], vmax=span[1], cmap="cividis", aspect="auto")
    best = np.nanmax(means, axis=0, initial=-np.inf)
    for (row, column), one in cells.items():
        if not one.count:
            continue
        shade = (one.mean - span[0]) / ((span[1] - span[0]) or 1.0)
        bold = one.high >= best[column] or one.mean == best[column]
        look = {"ha": "center", "color": "black" if shade > 0.55 else "white"}
        axis.text(column, row - 0.02, _short(one.mean), va="bottom", fontsize=6.5, fontweight=_weight(bold), **look)
        if one.count >= FEWEST_FOR_INTERVALS:
            axis.text(column, row + 0.06, f"{_short(one.low)}–{_short(one.high)}", va="top", fontsize=4.6, **look)


def _weight(bold: bool) -> str:
    return "bold" if bold else "normal"


def _short(value: float) -> str:
    """`.93`, `1.2`."""
    text = f"{value:.2f}" if abs(value) < 0.995 else f"{value:.1f}"
    return text.replace("0.", ".", 1) if abs(value) < 0.995 else text


def _said(plot: Plot) -> str:
    counts = [p.estimate.count for panel in plot.panels.values() for items in panel.values() for p in items]
    few, many = min(counts), max(counts)
    count = str(few) if few == many else f"{few} to {many}"
    interval = ", below them 95 % intervals" if few >= FEWEST_FOR_INTERVALS else ""
    return f"Means of {count} {plot.replicates}{interval}; {BEST}."
