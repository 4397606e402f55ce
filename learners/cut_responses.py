"""Weights for samples of groups that were closed at their first responses (`scheduler.oversample_responses`). Pure.

The slowest responses of such a group were cut, so short ones are trained too often. A response of length l had a chance
to be among the first: that at most need − 1 of the started − 1 others are shorter. Each sample weighs by the inverse of
that chance (Horvitz & Thompson 1952, JASA 47(260)). Lengths are taken as log-normal within a prompt: each group has its
own median, the batch one spread, both from the order of those that ended.
"""

from __future__ import annotations

import math
from statistics import NormalDist, fmean

import numpy as np

from areal_like.normal_scores import line, scores

MOST = 20.0
"""The largest weight before they are normalised."""
LEAST_SPREAD = 1e-3


def inverse_chances(lengths: np.ndarray, groups: np.ndarray, started: float) -> np.ndarray:
    """float64 [n], of mean 1 over the batch. `lengths` int [n] in tokens; `groups` int [n] names the group of each
    sample; `started` responses per one of the group, rounded up. Groups of one sample have
    the weight 1 before that."""
    weights = np.ones(len(lengths))
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    logs = np.log(np.maximum(1, lengths))
    fits = [line(np.sort(logs[of]).tolist(), math.ceil(len(of) * started)) for of in members if len(of) > 1]
    if not fits:
        return weights
    spread = max(LEAST_SPREAD, fmean(slope for _, slope in fits))
    for of in members:
        if len(of) < 2:
            continue
        launched = math.ceil(len(of) * started)
        median = logs[of].mean() - spread * fmean(scores(launched)[: len(of)])
        shorter = np.array([NormalDist().cdf((each - median) / spread) for each in logs[of]])
        weights[of] = 1.0 / np.maximum(_at_most(len(of) - 1, launched - 1, shorter), 1.0 / MOST)
    return weights / weights.mean()


def _at_most(most: int, others: int, chance: np.ndarray) -> np.ndarray:
    """P(at most `most` of `others` events with this chance)."""
    return sum(
        (math.comb(others, k) * chance**k * (1.0 - chance) ** (others - k) for k in range(most + 1)),
        start=np.zeros(len(chance)),
    )
