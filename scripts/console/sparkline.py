"""A curve in one line of text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """The values as at most `width` bars, from the least to the greatest; each bar is the mean of its part of them."""
    finite = [value for value in values if abs(value) < float("inf")]
    count = min(width, len(finite))
    cuts = [len(finite) * n // count for n in range(count + 1)] if count else []
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, spread = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    return "".join(BARS[round((mean - low) / spread * (len(BARS) - 1)) if spread else 0] for mean in means)
