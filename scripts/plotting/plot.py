"""The data of a plot, to and from JSON. Draws nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..analysis.intervals import CURVE_POINTS, Estimate, bootstrap

KINDS = ("curves", "against", "cells", "rows", "timelines")
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


@dataclass(frozen=True)
class Plot:
    """`panels`: title of the panel ("" for a single one) → label of the line → what is drawn.

    | kind | drawn | x, y |
    |---|---|---|
    | curves | a `Curve` per seed | labels of the axes, with units |
    | against | a `Point` per number on the x axis | the same |
    | cells | a `Point` per number on the x axis; the labels are rows of cells | x: the same |
    | rows | a `Point` per row, named by its x; of two labels, the first is the reference | x: the values' axis |
    | timelines | label: the process; (activity, begin, end), in seconds | |

    `log`: the values' axis is logarithmic. `even`: numbers on the x axis have equal distances. `ratio`: in rows, mark
    what is at least this many times the first. `replicates`: what the values of a point are. `note`: text below.
    """

    kind: str
    title: str
    panels: Mapping[str, Mapping[str, Sequence[Any]]]
    x: str = ""
    y: str = ""
    note: str = ""
    replicates: str = "seeds"
    log: bool = False
    even: bool = False
    ratio: float | None = None
    source: str = field(default="", compare=False)
    """The text that it was read from; names it in errors."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.source or 'a plot'}: kind is {' | '.join(KINDS)}; got {self.kind!r}")
        if not self.title:
            raise ValueError(f"{self.source or 'a plot'}: give it a title that says what it shows")

    def lines(self) -> list[str]:
        """The labels of all panels, in order."""
        return list(dict.fromkeys(label for panel in self.panels.values() for label in panel))

    def as_json(self) -> str:
        """A line per series."""
        parts = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name not in ("panels", "source")]
        head = [f" {json.dumps(name)}: {_text(value)}" for name, value in parts if value not in ("", None, False)]
        panels = []
        for title, panel in self.panels.items():
            series = [f"   {_text(label)}: {_text([_plain(i) for i in items])}" for label, items in panel.items()]
            panels.append(f"  {_text(title)}: {{\n" + ",\n".join(series) + "\n  }")
        return "{\n" + ",\n".join([*head, ' "panels": {\n' + ",\n".join(panels) + "\n }"]) + "\n}\n"


def read(path: Path) -> Plot:
    """Raises OSError, and ValueError if the file is no plot."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        item = _point if content["kind"] in ("against", "cells", "rows") else tuple
        panels = {
            title: {label: [item(each) for each in items] for label, items in panel.items()}
            for title, panel in content.pop("panels").items()
        }
        return Plot(**content, panels=panels, source=str(path))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no data of a plot ({type(error).__name__}: {error})") from None


def curve(x: Sequence[float], y: Sequence[float]) -> Curve:
    """The form in the file: of many points, only as many as a picture shows."""
    if len(x) > CURVE_POINTS:
        places = np.linspace(x[0], x[-1], CURVE_POINTS)
        x, y = places.tolist(), np.interp(places, x, y).tolist()
    return [_short(value, 6) for value in x], [_short(value, 4) for value in y]


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


def _point(content: dict[str, Any]) -> Point:
    if "values" in content:
        return point(content["x"], [*content["values"], *[None] * content.get("missing", 0)])
    mean, low, high = (float(content.get(name, math.nan)) for name in ("mean", "low", "high"))
    return Point(content["x"], Estimate(mean, low, high, content["count"], content["count"]))


def _short(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
