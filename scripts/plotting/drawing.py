"""From the data of a plot to its picture: a panel per title, a colour per label, thin lines and small dots for seeds.
An interval is drawn from five seeds on."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..analysis.intervals import FEWEST_FOR_INTERVALS, band
from .plot import Plot, Point

WIDTH, PANEL_HEIGHT, ROW_HEIGHT = 8.0, 3.0, 0.22
"""Inches."""
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#B8578F", "#E69F00", "#56B4E9", "#333333")
"""Okabe and Ito's, which the colour-blind tell apart (jfly.uni-koeln.de/color)."""
STYLES = ("-", "--", ":")
"""Of the first seven lines, and of more."""
ACTIVITIES = {
    "generate": "#56B4E9",
    "evaluate": "#B8A9D9",
    "update": "#D55E00",
    "train": "#00694C",
    "take": "#67C2A3",
    "publish": "#E69F00",
    "checkpoint": "#333333",
}
"""Of processes: name → colour, in the order in which they are drawn, each over the earlier ones."""
WAITS = "#e8e8e8"


def draw(plot: Plot) -> Any:
    """A matplotlib figure. Raises ValueError if there is nothing to draw."""
    if not any(items for panel in plot.panels.values() for items in panel.values()):
        raise ValueError(f"{plot.title}: there is nothing to draw")
    from matplotlib.figure import Figure

    by_rows = plot.kind in ("rows", "timelines")
    columns = 1 if plot.kind == "timelines" else min(3, len(plot.panels))
    lines = math.ceil(len(plot.panels) / columns)
    names = _names(plot)
    high = [max(PANEL_HEIGHT / 2, ROW_HEIGHT * len(panel if plot.kind == "timelines" else names))
            for panel in plot.panels.values()] if by_rows else [PANEL_HEIGHT] * len(plot.panels)  # fmt: skip
    heights = high[::columns]
    figure = Figure(figsize=(WIDTH, sum(heights) + 1.2), dpi=150, layout="constrained")
    share: dict[str, Any] = {"sharex": True, "sharey": plot.kind != "timelines", "height_ratios": heights}
    axes = figure.subplots(lines, columns, squeeze=False, **share).flatten().tolist()
    for axis, (title, panel) in zip(axes, plot.panels.items(), strict=False):
        axis.set_title(title, loc="left", fontsize=9, fontweight="bold")
        axis.spines[["top", "right"]].set_visible(False)
        _DRAWERS[plot.kind](axis, panel, plot)
    for spare in axes[len(plot.panels) :]:
        spare.remove()
    if plot.log:
        axes[0].set(**{"xscale" if by_rows else "yscale": "log"})
    figure.suptitle("\n".join(textwrap.wrap(plot.title, 80)), fontsize=11, fontweight="bold")
    figure.supxlabel("\n".join([plot.x, *textwrap.wrap(plot.note, 120)]).strip(), fontsize=8)
    figure.supylabel(plot.y, fontsize=8)
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True) if label}
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8, frameon=False)
    return figure


def _names(plot: Plot) -> list[str]:
    """Of the rows, in order."""
    items = (p for panel in plot.panels.values() for its in panel.values() for p in its if isinstance(p, Point))
    return list(dict.fromkeys(str(p.x) for p in items))


def _style(plot: Plot, label: str) -> dict[str, Any]:
    place = plot.lines().index(label)
    return {"color": PALETTE[place % len(PALETTE)], "linestyle": STYLES[place // len(PALETTE) % len(STYLES)]}


def _curves(axis: Any, panel: Mapping[str, Sequence[Any]], plot: Plot) -> None:
    for label, curves in panel.items():
        style = _style(plot, label)
        for x, y in curves if len(curves) > 1 else ():
            axis.plot(x, y, linewidth=0.5, alpha=0.4, **style)
        mean = band(curves)
        axis.plot(mean.x, mean.mean, label=label, linewidth=1.6, **style)
        if len(curves) >= FEWEST_FOR_INTERVALS:
            axis.fill_between(mean.x, mean.low, mean.high, color=style["color"], alpha=0.15, linewidth=0)


def _against(axis: Any, panel: Mapping[str, Sequence[Point]], plot: Plot) -> None:
    for label, points in panel.items():
        style, known = _style(plot, label), sorted((p for p in points if p.estimate.count), key=lambda p: float(p.x))
        x, mean = [float(p.x) for p in known], [p.estimate.mean for p in known]
        axis.plot(x, mean, label=label, marker="o", markersize=4, linewidth=1.6, **style)
        for p in known:
            axis.plot([float(p.x)] * len(p.values), p.values, "o", color=style["color"], markersize=2, alpha=0.4)
            if p.estimate.count >= FEWEST_FOR_INTERVALS:
                axis.vlines(float(p.x), p.estimate.low, p.estimate.high, color=style["color"], linewidth=1)
    numbers = sorted({float(p.x) for points in panel.values() for p in points})
    positive = [x for x in numbers if x > 0]
    if numbers and numbers[0] >= 0 and positive and positive[-1] / positive[0] >= 8:
        axis.set_xscale("symlog", base=2, linthresh=positive[0])
        axis.set_xticks(numbers, [f"{x:g}" for x in numbers])


def _rows(axis: Any, panel: Mapping[str, Sequence[Point]], plot: Plot) -> None:
    names = _names(plot)
    for place, (label, points) in enumerate(panel.items()):
        colour, shift = _style(plot, label)["color"], 0.3 * (place - (len(panel) - 1) / 2) / max(1, len(panel) - 1)
        for p in points:
            y = names.index(str(p.x)) + shift
            axis.plot(p.values, [y] * len(p.values), "o", color=colour, markersize=2, alpha=0.4)
            if p.estimate.count >= FEWEST_FOR_INTERVALS:
                axis.hlines(y, p.estimate.low, p.estimate.high, color=colour, linewidth=1)
        at = [names.index(str(p.x)) + shift for p in points]
        axis.plot([p.estimate.mean for p in points], at, "o", color=colour, markersize=4, label=label)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.4, -0.6)


def _timelines(axis: Any, panel: Mapping[str, Sequence[tuple[str, float, float]]], plot: Plot) -> None:
    last = max((end for spans in panel.values() for _, _, end in spans), default=1.0)
    used = {name for panel in plot.panels.values() for spans in panel.values() for name, _, _ in spans}
    for place, spans in enumerate(panel.values()):
        axis.broken_barh([(0, last)], (place - 0.4, 0.8), color=WAITS, label="waits" if not place else None)
        for name, colour in ACTIVITIES.items():
            bars = [(begin, end - begin) for each, begin, end in spans if each == name]
            label = name if not place and name in used else None
            axis.broken_barh(bars, (place - 0.4, 0.8), color=colour, linewidth=0, label=label)
    axis.set_yticks(range(len(panel)), list(panel), fontsize=8)
    axis.set_ylim(len(panel) - 0.5, -0.5)


_DRAWERS = {"curves": _curves, "against": _against, "rows": _rows, "timelines": _timelines}


def picture(plot: Plot, path: Path) -> None:
    """Write the picture, and make its folder. Raises ValueError if there is nothing to draw, OSError."""
    figure = draw(plot)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def keep(plot: Plot, path: Path) -> None:
    """The picture, and its data beside it as JSON."""
    picture(plot, path)
    path.with_suffix(".json").write_text(plot.as_json(), encoding="utf-8")
