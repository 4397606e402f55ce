"""The plots of a study: the curves, and of each measure its numbers against a key of the grid.

The first factor is compared. The x axis is the first other factor (or the only factor) whose values are all numbers.
The remaining factors have a panel per combination of values. Without a numeric factor a point is a row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..plotting.plot import Curve, Plot, Point, curve, point
from .measures import Measure
from .points import Key, Result, by_point
from .study import Study

UNITS = {"samples": "samples trained", "steps": "train steps", "seconds": "seconds since the first lease"}
"""Labels of the curves' x axes."""


def plots(study: Study, main: Sequence[Result]) -> dict[str, Plot]:
    """File → plot, of all that has numbers."""
    found = {"curves.png": _curves(study, main)}
    for name, measure in study.measures.items():
        found[f"measure-{re.sub(r'[^A-Za-z0-9.]+', '_', name)}.png"] = _measure(study, main, measure)
    return {name: plot for name, plot in found.items() if plot.panels}


def _curves(study: Study, main: Sequence[Result]) -> Plot:
    panels: dict[str, dict[str, list[Curve]]] = {}
    for key, results in by_point(study, main).items():
        curves = [result.outcome.curve(study.curve) for result in results if result.outcome]
        if known := [curve(x, y) for x, y in curves if x]:
            panels.setdefault(_panel(study, key), {})[key[0]] = known
    label, x = study.curve.label, UNITS[study.curve.x]
    return Plot("curves", _title(study, main, study.curve.title, label, x), panels, x=x, y=label, note=study.note)


def _measure(study: Study, main: Sequence[Result], measure: Measure) -> Plot:
    axis = _axis(study)
    panels: dict[str, dict[str, list[Point]]] = {}
    for key, results in by_point(study, main).items():
        numbers = [result.numbers[measure.name] for result in results]
        if all(number is None for number in numbers):
            continue
        if axis is None:
            panels.setdefault(_panel(study, key), {}).setdefault("", []).append(point(key[0], numbers))
        else:
            label = key[0] if axis else ""
            place = point(float(key[axis]), numbers)
            panels.setdefault(_panel(study, key, axis), {}).setdefault(label, []).append(place)
    title, label = measure.title, measure.label
    if axis is None:
        by = " and ".join(_name(study, factor).partition(",")[0] for factor in study.grid)
        return Plot("rows", _title(study, main, title, label, by), panels, x=label, note=study.note)
    x = _name(study, list(study.grid)[axis])
    return Plot("against", _title(study, main, title, label, x), panels, x=x, y=label, note=study.note)


def _axis(study: Study) -> int | None:
    """The place of the factor that is the x axis."""
    numeric = [place for place, labels in enumerate(study.grid.values()) if all(map(_is_number, labels))]
    allowed = [place for place in numeric if place or len(study.grid) == 1]
    return allowed[0] if allowed else None


def _is_number(label: str) -> bool:
    try:
        float(label)
    except ValueError:
        return False
    return True


def _name(study: Study, factor: str) -> str:
    return study.names.get(factor, factor.rpartition(".")[2])


def _panel(study: Study, key: Key, axis: int | None = None) -> str:
    """`staleness η = 8, mode = sync`: the factors that have neither lines nor the x axis."""
    factors = list(study.grid)
    rest = [place for place in range(1, len(factors)) if place != axis]
    return ", ".join(f"{_name(study, factors[place]).partition(',')[0]} = {key[place]}" for place in rest)


def _title(study: Study, main: Sequence[Result], finding: str, label: str, by: str) -> str:
    """The finding from the study's file, once all runs are finished; else what is shown, and the number of runs."""
    finished = sum(result.finished for result in main)
    if finding and finished == len(main):
        return finding
    shown = f"{label.partition(',')[0]} against {by.partition(',')[0]}"
    part = "" if finished == len(main) else f" ({finished} of {len(main)} runs)"
    return f"{shown[0].upper()}{shown[1:]}{part}"
