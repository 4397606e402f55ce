"""Who works and who waits: a panel per run, a row per process, a colour per activity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
"""In the order in which they are drawn, each over the earlier ones, and listed."""
SAID = {"take": "train on single groups", "update": "update weights"}
"""Clearer words for some recorded names."""
WAITS = "#e8e8e8"
ROW, BETWEEN, KEY = 0.145, 0.25, 0.22
"""Inches: of a process, between panels, of the line that names the colours."""
EARLY = 0.98
"""A run that ends before this share of the time is marked."""


def draw(plot: Plot) -> Any:
    rows = [len(panel) for panel in plot.panels.values()]
    figure = canvas(plot, ROW * sum(rows) + BETWEEN * len(rows) + 0.25 + KEY)
    axes = figure.subplots(len(rows), sharex=True, squeeze=False, height_ratios=rows).flatten().tolist()
    spans = [tuple(span) for panel in plot.panels.values() for items in panel.values() for span in items]
    begin, end = min((span[1] for span in spans), default=0.0), max((span[2] for span in spans), default=1.0)
    for axis, (title, panel) in zip(axes, plot.panels.items(), strict=True):
        _panel(axis, panel, end)
        name_panel(axis, title)
        axis.tick_params(bottom=axis is axes[-1])
        axis.spines["bottom"].set_visible(axis is axes[-1])
    axes[-1].set_xlim(begin, end)
    _key(figure, {span[0] for span in spans})
    return figure


def _panel(axis: Any, panel: Mapping[str, Sequence[Any]], end: float) -> None:
    plain(axis)
    axis.grid(visible=False)
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="y", length=0)
    last = max((span[2] for spans in panel.values() for span in spans), default=end)
    for place, spans in enumerate(panel.values()):
        axis.broken_barh([(0, last)], (place - 0.42, 0.84), color=WAITS, linewidth=0)
        for name, colour in ACTIVITIES.items():
            bars = [(span[1], span[2] - span[1]) for span in spans if span[0] == name]
            axis.broken_barh(bars, (place - 0.42, 0.84), color=colour, linewidth=0)
    if last < EARLY * end:
        axis.text(last, (len(panel) - 1) / 2, "  done", va="center", fontsize=TEXT, fontweight="bold")
    axis.set_yticks(range(len(panel)), list(panel))
    axis.set_ylim(len(panel) - 0.5, -0.5)


def _key(figure: Any, used: set[str]) -> None:
    """One line of colours above the panels: the same few activities come back in all of them."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=SAID.get(name, name)) for name, colour in ACTIVITIES.items() if name in used]
    handles.append(Patch(color=WAITS, label="waits"))
    layout = figure.get_layout_engine()
    left, bottom, width, height = layout.get()["rect"]
    layout.set(rect=(left, bottom, width, height - KEY / figure.get_figheight()))
    style = {"fontsize": TEXT, "frameon": False, "handlelength": 1.0, "handletextpad": 0.4, "columnspacing": 1.2}
    place = {"loc": "upper left", "bbox_to_anchor": (0.003, bottom + height), "borderaxespad": 0.0, "borderpad": 0.2}
    figure.legend(handles=handles, ncols=len(handles), **style, **place).set_in_layout(False)
