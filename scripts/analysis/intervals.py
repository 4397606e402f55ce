"""Statistics of repeated runs: means with bootstrap intervals, tables. Missing numbers are left out and counted."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

RESAMPLES = 10_000
CURVE_POINTS = 100
FEWEST_FOR_INTERVALS = 5
"""Fewest seeds for an interval: with fewer it would contain the mean in less than 92 % of cases (`bootstrap`)."""


class Estimate(NamedTuple):
    """A mean with its interval [low, high], from `n` of `asked` numbers; NaN without any, the interval with one."""

    mean: float
    low: float
    high: float
    n: int
    asked: int

    def __str__(self) -> str:
        """`0.931 [0.902, 0.955]`, with "(4 of 5)" after it if numbers are missing."""
        texts = _numbers(*(each for each in self[:3] if not math.isnan(each)))
        text = f"{texts[0]} [{', '.join(texts[1:])}]" if len(texts) > 1 else "".join(texts) or "-"
        return text if self.n == self.asked else f"{text} ({self.n} of {self.asked})"


def bootstrap(values: Iterable[float | None]) -> Estimate:
    """The mean of `values` and its percentile-bootstrap interval of 95 %, the same for the same values.

    The plain percentile interval of a few seeds is too narrow: its quantiles are moved outwards until it equals
    Student's interval for normal data (Hesterberg 2015, expanded percentile interval). It then contains the mean of
    normal data in 92 % of cases with 5 seeds (plain: 84 %), 95 % with 8; with 3 seeds it is the range (75 %).
    """
    given = np.array([np.nan if value is None else value for value in values], np.float64)
    known = given[~np.isnan(given)]
    if not len(known):
        return Estimate(math.nan, math.nan, math.nan, 0, len(given))
    low, high = _interval(known[:, None])[:, 0].tolist()
    return Estimate(float(known.mean()), low, high, len(known), len(given))


@functools.lru_cache(maxsize=2)
def _drawn(count: int) -> np.ndarray:
    """float64 [resamples, count]: how often each seed is drawn. A resampled mean is a row of a matrix product."""
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return drawn.astype(np.float64)


def _interval(values: np.ndarray) -> np.ndarray:
    """`values` [seeds, points] → [2, points]: low and high, NaN for fewer than two seeds."""
    count = len(values)
    if count < 2:
        return np.full((2, values.shape[1]), np.nan)
    from scipy.special import ndtr, stdtrit

    tail = float(ndtr(math.sqrt(count / (count - 1)) * stdtrit(count - 1, 0.025)))
    return np.quantile(_drawn(count) @ values / count, [tail, 1 - tail], axis=0)


def band(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[np.ndarray, ...]:
    """The mean of curves (x rising, y), one per seed, interpolated at common places: x, mean, low, high, each float64
    [points]; low and high are NaN for a single curve. Raises ValueError if the curves have no x in common."""
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if first > last:
        raise ValueError(f"the curves have no x in common: one begins at {first:g}, another ends at {last:g}")
    places = np.linspace(first, last, CURVE_POINTS)
    values = np.stack([np.interp(places, x, y) for x, y in curves])
    return places, values.mean(0), *_interval(values)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A markdown table, columns padded so that it reads well as text; an `Estimate` shows mean and interval."""
    cells = [[_cell(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    cells.insert(1, ["-" * width for width in widths])
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "".join(f"| {line} |\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = "".join(_numbers(value)) if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _numbers(*values: float) -> list[str]:
    """The numbers with as many decimals as show the largest with three significant digits."""
    largest = max(map(abs, values), default=0.0)
    if not math.isfinite(largest):
        return [str(value) for value in values]
    decimals = max(0, 2 - math.floor(math.log10(largest))) if largest else 3
    return [f"{value:,.{decimals}f}" for value in values]
