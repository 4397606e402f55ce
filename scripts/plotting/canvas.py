"""What all plots have in common: size, title, note, colours, and labels beside the lines that do not overlap."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .plot import Plot

WIDTH, DPI = 7.0, 200
"""Inches, dots per inch: 1,400 pixels wide; text of 8 points is 11 pixels high where a page shows 700 of them."""
TITLE, TEXT, SMALL = 11.5, 8.5, 7.5
"""Points."""
TITLE_CHARACTERS, SMALL_CHARACTERS = 70, 122
"""Most characters per line."""
GREY, FAINT = "#666666", "#d4d4d4"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#B8578F", "#E69F00", "#56B4E9", "#333333")
"""Okabe and Ito's, which the colour-blind tell apart (jfly.uni-koeln.de/color), its purple darker, without yellow."""
KNOWN = {
    "dg": "#D55E00",
    "ppo": "#0072B2",
    "decoupled_ppo": "#009E73",
    "m2po": "#B8578F",
    "tis": "#E69F00",
    "exact_iw": "#56B4E9",
    "reinforce": "#333333",
}
"""A loss has the same colour in all plots."""
LABEL = "label of a line"
"""`gid` of such texts."""


def colours(labels: Iterable[str]) -> dict[str, str]:
    """Label → colour. Labels that are no `KNOWN` loss get the other colours of the palette, in turn."""
    names = list(dict.fromkeys(labels))
    taken = {KNOWN[name] for name in names if name in KNOWN}
    left = [colour for colour in PALETTE if colour not in taken] or list(PALETTE)
    others = [name for name in names if name not in KNOWN]
    return {**{n: left[i % len(left)] for i, n in enumerate(others)}, **{n: KNOWN[n] for n in names if n in KNOWN}}


def ink(colour: str) -> tuple[float, float, float]:
    """The colour made darker, for legible text on white."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    darker = 0.72 if 0.3 * red + 0.59 * green + 0.11 * blue > 0.4 else 1.0
    return red * darker, green * darker, blue * darker


def canvas(plot: Plot, height: float, note: str = "") -> Any:
    """A figure (no window, no global state): title, labels of the axes, note, and `height` inches for what is drawn."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    title = balanced(plot.title, TITLE_CHARACTERS)
    below = textwrap.wrap(f"{note} {plot.note}".strip(), SMALL_CHARACTERS)
    top = 0.1 + 0.21 * len(title) + (0.2 if plot.y else 0.0)
    foot = 0.06 + 0.145 * len(below)
    bottom = foot + (0.2 if plot.x else 0.0)
    whole = top + height + bottom
    layout = ConstrainedLayoutEngine(rect=(0.005, bottom / whole, 0.99, height / whole), w_pad=0.03, h_pad=0.03)
    figure = Figure(figsize=(WIDTH, whole), dpi=DPI, layout=layout)
    y = 1 - 0.09 / whole
    left: dict[str, Any] = {"ha": "left", "va": "top", "in_layout": False}
    figure.text(0.012, y, "\n".join(title), fontsize=TITLE, fontweight="bold", linespacing=1.2, **left)
    if plot.y:
        figure.text(0.012, y - 0.21 * len(title) / whole, plot.y, fontsize=TEXT, color=GREY, **left)
    at_foot = {**left, "va": "bottom", "fontsize": SMALL, "color": GREY, "linespacing": 1.25}
    figure.text(0.012, 0.05 / whole, "\n".join(below), **at_foot)
    if plot.x:
        at_middle = {**at_foot, "ha": "center", "fontsize": TEXT}
        figure.text(0.5, (foot + 0.04) / whole, plot.x, **at_middle)
    return figure


def balanced(text: str, most: int) -> list[str]:
    """Lines of at most `most` characters, as few as can be: one per half sentence, or else about equally long."""
    lines = textwrap.wrap(text, most)
    halves = text.replace("; ", ";\n").split("\n")
    if len(halves) == len(lines) and all(len(half) <= most for half in halves):
        return halves
    while len(shorter := textwrap.wrap(text, max(map(len, lines)) - 1)) == len(lines):
        lines = shorter
    return lines


def columns_of(count: int) -> int:
    """Small panels in a row: as many as stay legible, in rows of equal length if possible."""
    return count if count <= 3 else math.ceil(count / math.ceil(count / 4))


def plain(axis: Any) -> None:
    """No frame, quiet ticks."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(GREY)
    axis.tick_params(labelsize=SMALL, color=GREY, labelcolor="#333333")
    axis.grid(axis="y", color="#ececec", linewidth=0.6)
    axis.set_axisbelow(True)


def logarithmic(axis: Any) -> None:
    """A logarithmic `axis.xaxis` or `.yaxis` with plain numbers; also at 2 and 5 if it spans little."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high / low < 300 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=9))
    axis.set_minor_formatter(NullFormatter())
    if low > 1e-4 and high < 1e6:
        axis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def name_panel(axis: Any, title: str, colour: str | None = None) -> None:
    axis.set_title(title, loc="left", fontsize=TEXT, fontweight="bold", pad=3, color=ink(colour) if colour else "black")


def spread(wanted: Sequence[float], gap: float, low: float = -math.inf, high: float = math.inf) -> list[float]:
    """Places as near to the wanted ones (least squares) as a distance of `gap` allows, in the same order; within
    [low, high] if they fit."""
    from scipy.optimize import isotonic_regression

    if not len(wanted):
        return []
    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(wanted))
    found = isotonic_regression(np.asarray(wanted, float)[order] - steps).x
    found = np.clip(found, low, max(low, high - steps[-1])) + steps
    places = np.empty(len(wanted))
    places[order] = found
    return places.tolist()


Ends = Mapping[str, tuple[float, float]]
"""Label → where its line ends: x and y in data."""


def label_ends(figure: Any, ends: Sequence[tuple[Any, Ends]], colour_of: Mapping[str, str], edge: int) -> None:
    """Write the labels to the right of their axes, each at the height of its line's end or as near as the others allow,
    with a line that leads there. Axes that do not reach column `edge` of the grid have room beside them already. Call
    it last: it lays the figure out."""
    texts = [_texts(axis, found, colour_of) for axis, found in ends]
    for (axis, _), each in zip(ends, texts, strict=True):
        for text in each.values():
            text.set_in_layout(axis.get_subplotspec().colspan.stop >= edge)
    figure.draw_without_rendering()
    for (axis, found), each in zip(ends, texts, strict=True):
        box, back = axis.get_window_extent(), axis.transData.inverted()
        wanted = [axis.transData.transform(found[label])[1] for label in each]
        for text, place in zip(
            each.values(), spread(wanted, TEXT * 1.2 / 72 * figure.dpi, box.y0, box.y1), strict=True
        ):
            text.set_position((1.0, back.transform((0.0, place))[1]))


def _texts(axis: Any, ends: Ends, colour_of: Mapping[str, str]) -> dict[str, Any]:
    from matplotlib.transforms import ScaledTranslation

    beside = axis.get_yaxis_transform() + ScaledTranslation(9 / 72, 0, axis.figure.dpi_scale_trans)
    leader = {"arrowstyle": "-", "lw": 0.6, "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)}
    return {
        label: axis.annotate(
            label, xy=end, xytext=(1.0, end[1]), xycoords="data", textcoords=beside, gid=LABEL, va="center",
            fontsize=TEXT, color=ink(colour_of[label]), annotation_clip=False,
            arrowprops={**leader, "color": colour_of[label]},
        )
        for label, end in ends.items()
        if label and math.isfinite(end[1])
    }  # fmt: skip
