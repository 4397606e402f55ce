"""Who works and who waits: a panel per run, a row per process, a colour per activity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .canvas import TEXT, canvas, name_panel, plain
from .plot import Plot

ACTIVITIES = {
    "generate": "#56B4E9",
    "evaluate": "#B8A9D9",
    "update": "#D55E00",
    "train": "#00694C",
    "take": "#67C2A3",
    "publish": "#E69F00",
    "checkpoint": "#333333",
}
"""In the order in which they are drawn, one over the other, and listed."""
SAID = {"take": "train on single groups", "update": "update weights"}
"""Where the recorded name tells an outsider little."""
ROW, BETWEEN = 0.145, 0.27
"""Inches."""


def draw(plot: Plot) -> Any:
    rows = [len(panel) for panel in plot.panels.values()]
    figure = canvas(plot, ROW * sum(rows) + BETWEEN * len(rows) + 0.75)
    axes = figure.subplots(len(rows), sharex=True, squeeze=False, height_ratios=rows).flatten().tolist()
    spans = [tuple(span) for panel in plot.panels.values() for items in panel.values() for span in items]
    for axis, (title, panel) in zip(axes, plot.panels.items(), strict=True):
        _panel(axis, panel.values(), list(panel))
        name_panel(axis, title)
    axes[-1].set_xlim(min((span[1] for span in spans), default=0.0), max((span[2] for span in spans), default=1.0))
    _key(figure, {span[0] for span in spans})
    return figure


def _panel(axis: Any, lines: Iterable[Sequence[Any]], names: list[str]) -> None:
    plain(axis)
    axis.grid(visible=False)
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="y", length=0)
    for place, spans in enumerate(lines):
        axis.axhspan(place - 0.42, place + 0.42, color="#f0f0f0", linewidth=0)
        for name, colour in ACTIVITIES.items():
            bars = [(begin, end - begin) for activity, begin, end in spans if activity == name]
            axis.broken_barh(bars, (place - 0.42, 0.84), color=colour, linewidth=0)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)


def _key(figure: Any, used: set[str]) -> None:
    """One line of colours above the panels: the same few activities come back in all of them."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=SAID.get(name, name)) for name, colour in ACTIVITIES.items() if name in used]
    handles.append(Patch(color="#f0f0f0", label="waits"))
    style = {"fontsize": TEXT, "frameon": False, "handlelength": 1.0, "handletextpad": 0.4, "columnspacing": 1.2}
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), borderaxespad=0.2, **style)
