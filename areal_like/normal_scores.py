"""Log-normal lengths of responses where the longest were cut: the line through ordered logs over normal scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, fmean


@lru_cache(256)
def scores(started: int) -> tuple[float, ...]:
    """Where the ordered values of so many standard normals lie on average (Blom 1958)."""
    return tuple(NormalDist().inv_cdf((place - 0.375) / (started + 0.25)) for place in range(1, started + 1))


def line(logs: Sequence[float], started: int) -> tuple[float, float]:
    """(mean, standard deviation) of `started` normal values. Only the least are known: at least 2, ascending."""
    x = scores(started)[: len(logs)]
    middle, mean = fmean(x), fmean(logs)
    slope = sum((a - middle) * (b - mean) for a, b in zip(x, logs, strict=True)) / sum((a - middle) ** 2 for a in x)
    return mean - slope * middle, slope
