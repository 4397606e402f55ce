"""What a plot shows, as data. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..analysis.intervals import CURVE_POINTS, Estimate, bootstrap

KINDS = ("curves", "against", "rows", "timelines")
Curve = tuple[list[float], list[float]]
"""x (rising) and y of one seed."""


@dataclass(frozen=True, slots=True)
class Point:
    """A mean at `x`, a number or a name. `values` are the seeds' numbers; none where only the estimate is known."""

    x: float | str
    estimate: Estimate
    values: tuple[float, ...] = ()


def point(x: float | str, values: Iterable[float | None]) -> Point:
    """Missing values are left out and counted (`intervals.bootstrap`)."""
    given = list(values)
    known = tuple(float(value) for value in given if value is not None and math.isfinite(value))
    return Point(x, bootstrap(given), known)


def curve(x: Sequence[float], y: Sequence[float]) -> Curve:
    """Of many points, only as many as a picture shows."""
    if len(x) > CURVE_POINTS:
        places = np.linspace(x[0], x[-1], CURVE_POINTS)
        x, y = places.tolist(), np.interp(places, x, y).tolist()
    return [_short(value, 6) for value in x], [_short(value, 4) for value in y]


@dataclass(frozen=True)
class Plot:
    """`panels`: title of the panel ("" for a single one) → label of the line → what is drawn.

    | kind | drawn |
    |---|---|
    | curves | a `Curve` per seed |
    | against | a `Point` per number on the x axis |
    | rows | a `Point` per row, named by its x; the x axis has the values |
    | timelines | label: the process; (activity, begin, end), in seconds |

    `x`, `y`: labels of the axes, with units. `log`: the values' axis is logarithmic. `note`: text below.
    """

    kind: str
    title: str
    panels: Mapping[str, Mapping[str, Sequence[Any]]]
    x: str = ""
    y: str = ""
    note: str = ""
    log: bool = False

    def lines(self) -> list[str]:
        """The labels of all panels, in order."""
        return list(dict.fromkeys(label for panel in self.panels.values() for label in panel))

    def as_json(self) -> str:
        """A line per series."""
        parts = [(field.name, getattr(self, field.name)) for field in fields(self) if field.name != "panels"]
        head = [f" {json.dumps(name)}: {_text(value)}" for name, value in parts if value not in ("", False)]
        panels = []
        for title, panel in self.panels.items():
            series = [f"   {_text(label)}: {_text([_plain(i) for i in items])}" for label, items in panel.items()]
            panels.append(f"  {_text(title)}: {{\n" + ",\n".join(series) + "\n  }")
        return "{\n" + ",\n".join([*head, ' "panels": {\n' + ",\n".join(panels) + "\n }"]) + "\n}\n"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(item: Any) -> Any:
    if not isinstance(item, Point):
        return list(item)
    if item.values:
        missing = item.estimate.asked - len(item.values)
        return {"x": item.x, "values": [_short(v, 6) for v in item.values], **({"missing": missing} if missing else {})}
    numbers = {"mean": item.estimate.mean, "low": item.estimate.low, "high": item.estimate.high}
    known = {name: _short(value, 6) for name, value in numbers.items() if not math.isnan(value)}
    return {"x": item.x, **known, "count": item.estimate.count}


def _short(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
