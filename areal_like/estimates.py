"""Estimates from held-out answers: mean rewards, pass@k, and intervals of 95 %. Pure."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Z = 1.959964
"""Normal quantile of a two-sided 95 % interval."""
RESAMPLES = 2000
MOST_RESAMPLED = 1000
"""Prompts up to which an interval is bootstrapped; of more, the mean is normal enough."""


class Estimate(NamedTuple):
    """A mean over prompts, and its interval of 95 %."""

    mean: float
    low: float
    high: float


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The unbiased estimate of the chance that one of `k` answers is right, from `right` of `samples` answers: 1 −
    C(samples − right, k) / C(samples, k) (Chen et al., arXiv 2107.03374). Raises ValueError unless 1 ≤ k ≤ samples."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, got {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def powers(samples: int) -> list[int]:
    """1, 2, 4, ... up to `samples`, and `samples` itself."""
    return sorted({*(2**n for n in range(samples.bit_length())), samples} & set(range(1, samples + 1)))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """An interval of 95 % for the mean of independent values, one per prompt.

    For values that are 0 or 1, or all equal within [0, 1]: Wilson's, which stays valid if all are 0 or all 1. For
    others: bootstrap over the prompts (percentiles of 2000 resamples, the same every time); for more than 1000 of them
    mean ± 1.96 standard errors. For a single value outside of [0, 1] nothing is known."""
    array = np.asarray(values, np.float64)
    count, mean = len(array), float(array.mean())
    if np.isin(array, (0.0, 1.0)).all() or (np.ptp(array) == 0.0 and 0.0 <= mean <= 1.0):
        centre = (mean + Z**2 / (2 * count)) / (1 + Z**2 / count)
        spread = Z / (1 + Z**2 / count) * math.sqrt(mean * (1 - mean) / count + Z**2 / (4 * count**2))
        return max(0.0, centre - spread), min(1.0, centre + spread)
    if count < 2:
        return -math.inf, math.inf
    if count > MOST_RESAMPLED:
        error = float(array.std(ddof=1)) / math.sqrt(count)
        return mean - Z * error, mean + Z * error
    places = np.random.default_rng(count).integers(count, size=(RESAMPLES, count))  # the same for as many values
    low, high = np.quantile(array[places].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def by_prompt(rewards: Sequence[Sequence[float]], ks: Sequence[int], right: float) -> dict[str, list[float]]:
    """Per prompt: the mean of its answers' rewards, and each pass@k; an answer is right from the reward `right` on."""
    counts = [sum(reward >= right for reward in each) for each in rewards]
    named = {"reward": [sum(each) / len(each) for each in rewards]}
    for k in ks:
        named[f"pass@{k}"] = [pass_at_k(len(each), n, k) for each, n in zip(rewards, counts, strict=True)]
    return named


def figures(rewards: Sequence[Sequence[float]], ks: Sequence[int], right: float) -> dict[str, Estimate]:
    """The mean reward (avg@n of n answers per prompt) and each pass@k: means of `by_prompt`."""
    named = by_prompt(rewards, ks, right)
    return {name: Estimate(sum(values) / len(values), *interval(values)) for name, values in named.items()}
