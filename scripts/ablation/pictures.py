"""The plots of a study: `curves.png`, and per measure its final numbers (`measure-NAME.png`).

The first factor is compared (a line, a colour). The x axis of a measure is the first other factor (or the only one)
whose values are all numbers; without one, each point is a row. The remaining factors have a panel per combination of
values. Seeds are thin lines or small dots; intervals are drawn for five seeds or more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ..analysis.intervals import FEWEST_FOR_INTERVALS, band, bootstrap
from .results import Key, Result
from .study import Study

Points = Mapping[Key, Sequence[Result]]
UNITS = {"samples": "samples trained", "steps": "train steps", "seconds": "seconds since the first lease"}
"""Labels of the curves' x axes."""
PANEL = (5.5, 3.6)
"""Width and height of a panel, in inches."""


def draw_all(study: Study, points: Points, folder: Path) -> None:
    """Write a picture of the curves and of each measure that has numbers."""
    _draw_curves(study, points, folder / "curves.png")
    for name in study.measures:
        _draw_measure(study, points, name, folder / f"measure-{re.sub(r'[^A-Za-z0-9.]+', '_', name)}.png")


def _draw_curves(study: Study, points: Points, path: Path) -> None:
    panels: dict[str, dict[str, list[Any]]] = {}
    for key, results in points.items():
        curves = [curve for result in results if result.outcome and (curve := result.outcome.curve(study.curve))[0]]
        if curves:
            panels.setdefault(_panel(study, key, None), {})[key[0]] = curves
    for axes, label, curves in _lines(panels, path, UNITS[study.curve.x], study.curve.y):
        mean = band(curves)
        (line,) = axes.plot(mean.x, mean.mean, label=label)
        for x, y in curves if len(curves) > 1 else ():
            axes.plot(x, y, color=line.get_color(), alpha=0.25, linewidth=0.7)
        if len(curves) >= FEWEST_FOR_INTERVALS:
            axes.fill_between(mean.x, mean.low, mean.high, color=line.get_color(), alpha=0.15, linewidth=0)


def _draw_measure(study: Study, points: Points, name: str, path: Path) -> None:
    axis = _axis(study)
    panels: dict[str, dict[str, list[Any]]] = {}
    for key, results in points.items():
        values = [number for result in results if (number := result.numbers[name]) is not None]
        if values:
            label = key[0] if axis or axis is None else ""
            place = key[0] if axis is None else float(key[axis])
            panels.setdefault(_panel(study, key, axis), {}).setdefault(label, []).append((place, values))
    by = list(study.grid)[axis or 0]
    for axes, label, numbers in _lines(panels, path, by, name):
        found = [bootstrap(values) for _, values in numbers]
        x, means = [place for place, _ in numbers], [each.mean for each in found]
        (line,) = axes.plot(x, means, marker="o", label=label)
        for (place, values), each in zip(numbers, found, strict=True):
            axes.plot([place] * len(values), values, ".", color=line.get_color(), alpha=0.4, markersize=4)
            if each.count >= FEWEST_FOR_INTERVALS:
                axes.vlines(place, each.low, each.high, color=line.get_color(), linewidth=1)


def _lines(panels: Mapping[str, Mapping[str, list[Any]]], path: Path, x: str, y: str) -> Any:
    """Yield (axes, label, data) of each line; then finish the figure and write it. Nothing without panels."""
    if not panels:
        return
    size = (PANEL[0], PANEL[1] * len(panels))
    figure, grid = plt.subplots(len(panels), sharex=True, sharey=True, squeeze=False, figsize=size)
    for axes, (title, lines) in zip(grid[:, 0], panels.items(), strict=True):
        for label, data in lines.items():
            yield axes, label, data
        axes.set(title=title, ylabel=y)
        if any(lines):
            axes.legend(fontsize="small")
    grid[-1, 0].set_xlabel(x)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _axis(study: Study) -> int | None:
    """The place of the factor that is the x axis."""
    numeric = [place for place, labels in enumerate(study.grid.values()) if all(map(_is_number, labels))]
    return next((place for place in numeric if place or len(study.grid) == 1), None)


def _is_number(label: str) -> bool:
    try:
        float(label)
    except ValueError:
        return False
    return True


def _panel(study: Study, key: Key, axis: int | None) -> str:
    """`max_staleness = 8, mode = sync`: the factors that have neither lines nor the x axis."""
    factors = [factor.rpartition(".")[2] for factor in study.grid]
    return ", ".join(f"{factors[place]} = {key[place]}" for place in range(1, len(key)) if place != axis)
