"""pass@k, and intervals of means. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.959964
"""Normal quantile of a two-sided 95 % interval."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The unbiased estimate of the chance that one of `k` answers is right, from `right` of `samples` answers.

    1 − C(samples − right, k) / C(samples, k) (Chen et al., arXiv 2107.03374, equation 1). Raises ValueError unless
    1 ≤ k ≤ samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, got {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def powers(samples: int) -> list[int]:
    """1, 2, 4, ... up to `samples`, and `samples` itself."""
    return sorted({*(2**n for n in range(samples.bit_length())), samples} & set(range(1, samples + 1)))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """An interval of 95 % for the mean of independent values, one per prompt.

    For values within [0, 1] it is Wilson's, which stays valid if all values are 0 or all are 1. Wilson's takes the
    variance of right and wrong answers, the largest possible one; so it is wide for means of several samples. For other
    values: mean ± 1.96 standard errors.
    """
    count, mean = len(values), sum(values) / len(values)
    if min(values) >= 0.0 and max(values) <= 1.0:
        centre = (mean + Z**2 / (2 * count)) / (1 + Z**2 / count)
        spread = Z / (1 + Z**2 / count) * math.sqrt(mean * (1 - mean) / count + Z**2 / (4 * count**2))
        return max(0.0, centre - spread), min(1.0, centre + spread)
    if count < 2:
        return -math.inf, math.inf
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    return mean - Z * deviation / math.sqrt(count), mean + Z * deviation / math.sqrt(count)
