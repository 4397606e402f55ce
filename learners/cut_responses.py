"""Weights for samples of groups that were closed at their first responses (`scheduler.oversample_responses`). Pure.

The slowest responses of such a group were cut, so short ones are trained too often. A response of length l had a chance
to be among the first: that at most need − 1 of the started − 1 others are shorter. Each sample weighs by the inverse of
that chance (Horvitz & Thompson 1952, JASA 47(260)). Lengths are modelled as log-normal within a prompt: each group has
its own median, the batch has one spread, and both come from the ordered lengths of the responses that ended. A few
lengths determine a group's median only roughly. So it is shrunk towards the batch's median by the share of the medians'
differences that chance explains (empirical Bayes: Morris 1983, JASA 78(381)). A weight is the mean over the possible
medians. Otherwise a group that is long by chance would count as a prompt of long answers, and its longest answer as
usual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, fmean

import numpy as np

MOST = 20.0
"""The largest weight before they are normalised."""
LEAST_SPREAD = 1e-3
LEAST_GROUPS = 3
"""With fewer groups the spread of medians is unknown: each group keeps its own."""
DRAWS = 8192
"""Draws of `_variance`, from a fixed seed: the same in each process."""
NODES, SHARES = np.polynomial.hermite_e.hermegauss(9)
"""Places of a standard normal, and their shares: a mean over it is a sum over nine."""
SHARES = SHARES / SHARES.sum()


def inverse_chances(lengths: np.ndarray, groups: np.ndarray, started: float) -> np.ndarray:
    """Weights float64 [n], normalised to mean 1 over the batch. `lengths` int [n] in tokens; `groups` int [n] names the
    group of each sample; `started`: responses started per sample (a group's total is rounded up). A group of one sample
    has weight 1 before normalisation."""
    weights, logs = np.ones(len(lengths)), np.log(np.maximum(1, lengths))
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    members = [of for of in members if len(of) > 1]
    if not members:
        return weights
    sizes = [(len(of), math.ceil(len(of) * started)) for of in members]
    fits = [line(np.sort(logs[of]).tolist(), launched) for of, (_, launched) in zip(members, sizes, strict=True)]
    spread = max(LEAST_SPREAD, fmean(slope for _, slope in fits))
    below = [spread * fmean(scores(launched)[:count]) for count, launched in sizes]
    medians = np.array([logs[of].mean() for of in members]) - below
    medians, errors = _shrunk(medians, spread**2 * np.array([_variance(*each) for each in sizes]))
    for of, median, error, (count, launched) in zip(members, medians, errors, sizes, strict=True):
        scored = (logs[of] - median - error * NODES[:, None]) / spread  # [nodes, samples]
        shorter = np.vectorize(NormalDist().cdf)(scored)
        weights[of] = SHARES @ (1.0 / np.maximum(_at_most(count - 1, launched - 1, shorter), 1.0 / MOST))
    return weights / weights.mean()


def _shrunk(medians: np.ndarray, variances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Posterior means and standard deviations of each group's median [n], from estimates with these variances."""
    if len(medians) < LEAST_GROUPS:
        return medians, np.sqrt(variances)
    mean, apart = medians.mean(), max(0.0, float(medians.var(ddof=1) - variances.mean()))
    share = apart / (apart + variances)
    return mean + share * (medians - mean), np.sqrt(share * variances)


@lru_cache(256)
def _variance(count: int, started: int) -> float:
    """Variance of the mean of the smallest `count` of `started` standard normals."""
    draws = np.sort(np.random.default_rng(0).standard_normal((DRAWS, started)), axis=1)
    return float(draws[:, :count].mean(1).var())


def _at_most(most: int, others: int, chance: np.ndarray) -> np.ndarray:
    """P(at most `most` of `others` events with this chance)."""
    return sum(
        (math.comb(others, k) * chance**k * (1.0 - chance) ** (others - k) for k in range(most + 1)),
        start=np.zeros(chance.shape),
    )


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
