"""Statistics of repeated runs: means with bootstrap intervals, markdown tables. Knows nothing of runs and configs.

One number per seed goes in. A missing number (None or NaN: a failed run, a target never reached) is left out and
counted: an `Estimate` has both counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 10_000
CURVE_POINTS = 100
FEWEST_FOR_INTERVALS = 5
"""Fewest seeds for an interval in pictures. With fewer it would contain the mean in less than 92 % of cases
(`bootstrap`)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its interval [low, high], from `count` numbers; `asked` − `count` are missing.

    The mean is NaN without numbers; low and high are NaN with fewer than two.
    """

    mean: float
    low: float
    high: float
    count: int
    asked: int

    def __str__(self) -> str:
        return self.text()

    def text(self, digits: int = 3) -> str:
        """`0.931 [0.902, 0.955]`, with "(4 of 5)" after it if numbers are missing; `-` without any."""
        if not self.count:
            return f"- (0 of {self.asked})" if self.asked else "-"
        places = _decimals(max(abs(n) for n in (self.mean, self.low, self.high) if not math.isnan(n)), digits)
        text = _number(self.mean, places)
        if not math.isnan(self.low):
            text += f" [{_number(self.low, places)}, {_number(self.high, places)}]"
        return text if self.count == self.asked else f"{text} ({self.count} of {self.asked})"


def bootstrap(values: Iterable[float | None], *, level: float = 0.95, seed: int = 0) -> Estimate:
    """The mean of `values` and its percentile-bootstrap interval, the same for the same values and seed.

    The plain percentile interval of a few seeds is too narrow. So its quantiles are moved outwards, until it equals
    Student's interval for normal data (Hesterberg, "What teachers should know about the bootstrap", 2015: expanded
    percentile interval). Intervals of 95 % then contain the mean of normal data in 92 % of cases with 5 seeds (plain:
    84 %) and 95 % with 8 (89 %). With 3 seeds they are the range of the values and contain it in 75 %.
    """
    given = np.array([np.nan if value is None else value for value in values], np.float64)
    known = given[~np.isnan(given)]
    if not len(known):
        return Estimate(math.nan, math.nan, math.nan, 0, len(given))
    low, high = _interval(known[:, None], level, seed)[:, 0].tolist()
    return Estimate(float(known.mean()), low, high, len(known), len(given))


@functools.lru_cache(maxsize=2)
def _drawn(count: int, seed: int) -> np.ndarray:
    """float64 [resamples, count]: how often each seed is drawn, rather than which. A resampled mean is then one row of
    a matrix product."""
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return drawn.astype(np.float64)


def _interval(values: np.ndarray, level: float, seed: int) -> np.ndarray:
    """`values` [seeds, points] → [2, points]: low and high, NaN for fewer than two seeds."""
    count = len(values)
    if count < 2:
        return np.full((2, values.shape[1]), np.nan)
    from scipy.special import ndtr, stdtrit

    tail = float(ndtr(math.sqrt(count / (count - 1)) * stdtrit(count - 1, (1 - level) / 2)))
    return np.quantile(_drawn(count, seed) @ values / count, [tail, 1 - tail], axis=0)


@dataclass(frozen=True, slots=True)
class Band:
    """A mean curve: `x`, `mean`, `low`, `high`, each float64 [points]; low and high are NaN for a single curve."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band(curves: Sequence[tuple[Sequence[float], Sequence[float]]], *, level: float = 0.95, seed: int = 0) -> Band:
    """The mean of curves (x rising, y), one per seed, linearly interpolated at common places, with its interval.

    It covers the x that every curve has. Raises ValueError if there is none, or no curve.
    """
    if not curves or not all(len(x) for x, _ in curves):
        raise ValueError("a band needs curves with points")
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if first > last:
        raise ValueError(f"the curves have no x in common: one begins at {first:g}, another ends at {last:g}")
    places = np.linspace(first, last, CURVE_POINTS)
    values = np.stack([np.interp(places, x, y) for x, y in curves])
    low, high = _interval(values, level, seed)
    return Band(places, values.mean(0), low, high)


# Tables


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A markdown table, columns padded so that it reads well as text; an `Estimate` shows mean and interval."""
    cells = [[_cell(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "".join(f"| {line} |\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = _number(value, _decimals(value, 3)) if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _decimals(value: float, digits: int) -> int:
    """Decimals that show `value` with this many significant digits; −1 if only an exponent can."""
    if not value or not math.isfinite(value):
        return digits
    return max(0, digits - 1 - math.floor(math.log10(abs(value)))) if 1e-4 <= abs(value) < 1e9 else -1


def _number(value: float, decimals: int) -> str:
    if not math.isfinite(value):
        return "-" if math.isnan(value) else str(value)
    return f"{value:,.{decimals}f}" if decimals >= 0 else f"{value:.2e}"
