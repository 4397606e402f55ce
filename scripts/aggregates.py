"""Methods compared over several conditions at once, as rliable does it (Agarwal et al. 2021, arXiv 2108.13264). Pure.

Scores are condition → one number per seed, for each method. Intervals are of a stratified bootstrap: seeds are drawn
anew within each condition, conditions stay. rliable itself is not used: it wants scores as one full matrix, and brings
its own plots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy.stats import trim_mean

from .intervals import Estimate
from .pairing import Paired, paired

Scores = Mapping[str, Sequence[float]]
"""Condition → numbers of the seeds."""
RESAMPLES = 2000
TRIMMED = 0.25
"""Share that the interquartile mean leaves out at either end."""


def iqm(scores: Scores, *, level: float = 0.95) -> Estimate:
    """The mean of the middle half of all runs. Less moved by one collapsed seed than the mean, and more certain than
    the median. Raises ValueError without a number."""
    return _estimate(scores, lambda runs: trim_mean(runs, TRIMMED, axis=-1), level)


def profile(scores: Scores, thresholds: Sequence[float], *, level: float = 0.95) -> list[Estimate]:
    """The share of all runs above each threshold (performance profile)."""

    def above(runs: np.ndarray, at: float) -> np.ndarray:
        return (runs > at).mean(-1)

    return [_estimate(scores, partial(above, at=at), level) for at in thresholds]


def improvement(scores: Scores, others: Scores, *, level: float = 0.95) -> Estimate:
    """The chance that a run of the first method is better than one of the other in the same condition, ties half; mean
    over the conditions of both. Raises ValueError without any."""
    shared = [name for name in scores if name in others and len(scores[name]) and len(others[name])]
    if not shared:
        raise ValueError("two methods without a condition in common")
    draws = np.random.default_rng(0)
    whole, again = [], []
    for name in shared:
        a, b = (np.asarray(each[name], np.float64) for each in (scores, others))
        wins = np.sign(a[:, None] - b) / 2 + 0.5
        rows, columns = (draws.multinomial(len(x), np.full(len(x), 1 / len(x)), RESAMPLES) / len(x) for x in (a, b))
        whole.append(float(wins.mean()))
        again.append(((rows @ wins) * columns).sum(1))
    low, high = _quantiles(np.mean(again, 0), level)
    count = sum(len(scores[name]) for name in shared)
    return Estimate(fmean(whole), low, high, count, count)


def _estimate(scores: Scores, statistic: Callable[[np.ndarray], np.ndarray], level: float) -> Estimate:
    known = [np.asarray(values, np.float64) for values in scores.values() if len(values)]
    if not known:
        raise ValueError("no number to take a mean of")
    every, draws = np.concatenate(known), np.random.default_rng(0)
    again = [values[draws.integers(len(values), size=(RESAMPLES, len(values)))] for values in known]
    low, high = _quantiles(statistic(np.concatenate(again, 1)), level)
    return Estimate(float(statistic(every)), low, high, len(every), len(every))


def _quantiles(values: np.ndarray, level: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return low, high


class Pair(NamedTuple):
    """Two methods: the second minus the first over seeds that both have, and p after Holm's correction."""

    first: str
    second: str
    found: Paired
    p: float


def pairwise(methods: Mapping[str, Mapping[int, float]]) -> list[Pair]:
    """Every pair of methods, whose numbers are by seed: a seed's mean over conditions where there are several, since a
    seed's runs under two conditions start alike and are not independent. Permutation tests over the shared seeds."""
    found = []
    for first, second in combinations(methods, 2):
        shared = [seed for seed in methods[first] if seed in methods[second]]
        if shared:
            pair = paired(*([methods[name][seed] for seed in shared] for name in (first, second)))
            found.append((first, second, pair))
    adjusted = holm([pair.p for _, _, pair in found])
    return [Pair(first, second, pair, p) for (first, second, pair), p in zip(found, adjusted, strict=True)]


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the given order."""
    order, largest = sorted(range(len(values)), key=values.__getitem__), 0.0
    found = list(values)
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - place) * values[index]))
        found[index] = largest
    return found
