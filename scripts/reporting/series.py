"""Metrics of any number of train steps in a bounded number of buckets of equal width.

When there are too many buckets, neighbours merge, so memory does not grow with the run. A bucket has each metric's
mean, lowest and highest value: a spike of a single step stays visible.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

MOST_BUCKETS = 500
HISTOGRAM = "staleness/histogram"
"""The key of metrics.jsonl that is kept over time."""
MOST_VALUES = 24
"""Rows of a heat map: more values share rows of equal width."""


class Bucket:
    """`numbers`: key → sum, count, lowest, highest. `ages`: staleness → samples."""

    def __init__(self) -> None:
        self.numbers: dict[str, tuple[float, int, float, float]] = {}
        self.ages: Counter[float] = Counter()

    def add(self, row: dict[str, Any]) -> None:
        for key, value in row.items():
            if isinstance(value, int | float):
                self._merge(key, (value, 1, value, value))
        self.ages.update({float(age): count for age, count in row.get(HISTOGRAM, {}).items()})

    def absorb(self, other: Bucket) -> None:
        for key, more in other.numbers.items():
            self._merge(key, more)
        self.ages.update(other.ages)

    def _merge(self, key: str, more: tuple[float, int, float, float]) -> None:
        if known := self.numbers.get(key):
            more = known[0] + more[0], known[1] + more[1], min(known[2], more[2]), max(known[3], more[3])
        self.numbers[key] = more


class Series:
    """At most `most` buckets, each of `width` train steps."""

    def __init__(self, most: int = MOST_BUCKETS):
        self._most, self.width = most, 1
        self._buckets: dict[int, Bucket] = {}

    def add(self, row: dict[str, Any]) -> None:
        self._buckets.setdefault((int(row["step"]) - 1) // self.width, Bucket()).add(row)
        while len(self._buckets) > self._most:
            self.width *= 2
            before, self._buckets = self._buckets, {}
            for place, bucket in before.items():
                self._buckets.setdefault(place // 2, Bucket()).absorb(bucket)

    def data(self) -> dict[str, Any]:
        """`columns`: key → `y` (means), and where steps of a bucket differ `lo` and `hi`, a value per bucket (None:
        there is none). `ages`: `values` and `shares` [values][buckets]."""
        buckets = [self._buckets[place] for place in sorted(self._buckets)]
        keys = dict.fromkeys(key for bucket in buckets for key in bucket.numbers)
        columns = {key: _column([bucket.numbers.get(key) for bucket in buckets]) for key in keys}
        return {"width": self.width, "columns": columns, "ages": _shares([bucket.ages for bucket in buckets])}


def short(value: float) -> float | None:
    """With five significant digits; None for what JSON cannot hold."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _column(numbers: list[tuple[float, int, float, float] | None]) -> dict[str, list[float | None]]:
    found = {"y": [short(each[0] / each[1]) if each else None for each in numbers]}
    if any(each and each[2] != each[3] for each in numbers):
        found["lo"] = [short(each[2]) if each else None for each in numbers]
        found["hi"] = [short(each[3]) if each else None for each in numbers]
    return found


def _shares(counts: list[Counter[float]]) -> dict[str, Any]:
    values = sorted({value for each in counts for value in each})
    if not values:
        return {"values": [], "shares": []}
    step = max(1.0, math.ceil((values[-1] - values[0] + 1) / MOST_VALUES))
    shares = [[0.0] * len(counts) for _ in range(int((values[-1] - values[0]) // step) + 1)]
    for column, each in enumerate(counts):
        for value, count in each.items():
            shares[int((value - values[0]) // step)][column] += count / each.total()
    rounded = [[round(share, 3) for share in row] for row in shares]
    return {"values": [values[0] + step * row for row in range(len(shares))], "shares": rounded}
