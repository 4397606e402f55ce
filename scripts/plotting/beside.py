"""What was simulated, and a formula's values beside it: panels below each other, each with axes of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .canvas import TEXT, canvas, colours, label_ends, name_panel, plain
from .plot import Plot

HEIGHT = 2.4
"""Inches of a panel."""
Points = Mapping[float, float]
"""x → y."""


@dataclass(frozen=True)
class Panel:
    """`lines`: label → what is drawn with dots; `formulas`: the same labels, or others → what is dashed. `marked`: a
    point with a ring around it. `names` of x values, where those are places only."""

    title: str
    x: str
    lines: Mapping[str, Points]
    formulas: Mapping[str, Points]
    marked: tuple[float, float] | None = None
    names: Mapping[float, str] = field(default_factory=dict)


def plot_beside(path: Path, title: str, panels: Sequence[Panel], note: str) -> None:
    """Values that are not finite are left out."""
    figure = canvas(Plot("against", title, {}, note=note), HEIGHT * len(panels))
    axes = figure.subplots(len(panels), squeeze=False).flatten().tolist()
    colour_of = colours(label for panel in panels for label in (*panel.lines, *panel.formulas))
    ends = [(axis, _draw(axis, panel, colour_of)) for axis, panel in zip(axes, panels, strict=True)]
    label_ends(figure, ends, colour_of, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw(axis: Any, panel: Panel, colour_of: Mapping[str, str]) -> dict[str, tuple[float, float]]:
    """Where each label's line ends."""
    ends: dict[str, tuple[float, float]] = {}
    styles: tuple[tuple[Mapping[str, Points], dict[str, Any]], ...] = (
        (panel.formulas, {"linestyle": (0, (4, 3)), "linewidth": 1.0, "zorder": 4}),
        (panel.lines, {"marker": "o", "markersize": 3.5, "linewidth": 1.7, "zorder": 3}),
    )
    for drawn, style in styles:
        for label, points in drawn.items():
            known = sorted((x, y) for x, y in points.items() if math.isfinite(y))
            if known:
                axis.plot(*zip(*known, strict=True), color=colour_of[label], **style)
                ends[label] = max(known[-1], ends.get(label, known[-1]))
    if panel.marked:
        axis.plot(
            *panel.marked, marker="o", markersize=9, markerfacecolor="none", color="black", linestyle="", zorder=5
        )
    plain(axis)
    name_panel(axis, panel.title)
    axis.set_xlabel(panel.x, fontsize=TEXT)
    axis.set_ylim(0)
    if panel.names:
        axis.set_xticks(list(panel.names), list(panel.names.values()))
    return ends
