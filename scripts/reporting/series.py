"""Metrics of any number of train steps in a bounded number of buckets of equal width.

When there are too many buckets, neighbours merge, so memory does not grow with the run. A bucket knows each metric's
mean, lowest and highest value: a spike of a single step stays visible.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

Summary = list[float]
"""Sum, count, lowest, highest."""
HISTOGRAMS = {"staleness/histogram": "staleness", "response_length/histogram": "length"}
"""Keys of metrics.jsonl that are kept over time → their names on the page."""
MOST_VALUES = 24
"""Rows of a heat map: more values share rows of equal width."""


class Bucket:
    def __init__(self) -> None:
        self.numbers: dict[str, Summary] = {}
        self.counts: dict[str, Counter[float]] = {}

    def add(self, row: dict[str, Any], wanted: Callable[[str], bool]) -> None:
        for key, value in row.items():
            if isinstance(value, dict):
                if name := HISTOGRAMS.get(key):
                    self.counts.setdefault(name, Counter()).update({float(v): n for v, n in value.items()})
            elif isinstance(value, int | float) and wanted(key):
                self._merge(key, [float(value), 1, value, value])

    def absorb(self, other: Bucket) -> None:
        for key, summary in other.numbers.items():
            self._merge(key, summary)
        for name, counts in other.counts.items():
            self.counts.setdefault(name, Counter()).update(counts)

    def _merge(self, key: str, more: Summary) -> None:
        known = self.numbers.get(key)
        if known is None:
            self.numbers[key] = list(more)
            return
        known[0] += more[0]
        known[1] += more[1]
        known[2] = min(known[2], more[2])
        known[3] = max(known[3], more[3])


class Series:
    """At most `most` buckets. `wanted` says which keys are kept; `step` and `seconds` always are."""

    def __init__(self, most: int, wanted: Callable[[str], bool] = lambda key: True):
        self._most, self._wanted = most, lambda key: key in ("step", "seconds") or wanted(key)
        self._buckets: dict[int, Bucket] = {}
        self.width = 1
        """Train steps per bucket."""

    def add(self, row: dict[str, Any]) -> None:
        place = (int(row["step"]) - 1) // self.width
        self._buckets.setdefault(place, Bucket()).add(row, self._wanted)
        while len(self._buckets) > self._most:
            self._halve()

    def _halve(self) -> None:
        self.width *= 2
        before, self._buckets = self._buckets, {}
        for place, bucket in before.items():
            self._buckets.setdefault(place // 2, Bucket()).absorb(bucket)

    def data(self, extremes: bool = True) -> dict[str, Any]:
        """`columns`: key → `y` (means), and with `extremes` also `lo` and `hi`, if buckets have several steps; a
        value for each bucket, None if there is none. `heat`: name → `values` and `shares` [values][buckets]."""
        buckets = [self._buckets[place] for place in sorted(self._buckets)]
        keys = dict.fromkeys(key for bucket in buckets for key in bucket.numbers)
        columns = {key: _column([bucket.numbers.get(key) for bucket in buckets], extremes) for key in keys}
        names = dict.fromkeys(name for bucket in buckets for name in bucket.counts)
        heat = {name: _heat([bucket.counts.get(name, Counter()) for bucket in buckets]) for name in names}
        return {"width": self.width, "columns": columns, "heat": heat}


def short(value: float) -> float | None:
    """With five significant digits; None for what JSON cannot hold."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _column(summaries: list[Summary | None], extremes: bool) -> dict[str, list[float | None]]:
    found = {"y": [short(each[0] / each[1]) if each else None for each in summaries]}
    if extremes and any(each and each[2] != each[3] for each in summaries):
        found["lo"] = [short(each[2]) if each else None for each in summaries]
        found["hi"] = [short(each[3]) if each else None for each in summaries]
    return found


def _heat(counts: list[Counter[float]]) -> dict[str, Any]:
    values = sorted({value for each in counts for value in each})
    if not values:
        return {"values": [], "shares": []}
    step = max(1.0, math.ceil((values[-1] - values[0] + 1) / MOST_VALUES))
    rows = int((values[-1] - values[0]) // step) + 1
    shares = [[0.0] * len(counts) for _ in range(rows)]
    for column, each in enumerate(counts):
        total = sum(each.values())
        for value, count in each.items():
            shares[int((value - values[0]) // step)][column] += count / total
    return {
        "values": [values[0] + step * row for row in range(rows)],
        "step": step,
        "shares": [[round(share, 3) for share in row] for row in shares],
    }
