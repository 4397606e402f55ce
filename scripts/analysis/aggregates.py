"""Methods compared over several conditions at once, as rliable does it (Agarwal et al. 2021, arXiv 2108.13264). Pure.

Scores are condition → one number per seed, for each method. Intervals are of a stratified bootstrap: seeds are drawn
anew within each condition, conditions stay. rliable itself is not used: it wants scores as one full matrix, and brings
its own plots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
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
    return _estimates(scores, lambda runs: [trim_mean(runs, TRIMMED, axis=-1)], level)[0]


def profile(scores: Scores, thresholds: Sequence[float], *, level: float = 0.95) -> list[Estimate]:
    """The share of all runs above each threshold (performance profile)."""
    return _estimates(scores, lambda runs: [(runs > at).mean(-1) for at in thresholds], level)


def improvement(scores: Scores, others: Scores, *, level: float = 0.95) -> Estimate:
    """The chance that a run of the first method is better than one of the other in the same condition, ties half; mean
    over the conditions of both. Raises ValueError without any."""
    shared = [name for name in scores if name in others and len(scores[name]) and len(others[name])]
    if not shared:
        raise ValueError("two methods without a condition in common")
    whole, again = [], []
    shares = _shares(tuple((len(scores[name]), len(others[name])) for name in shared))
    for name, (rows, columns) in zip(shared, shares, strict=True):
        a, b = (np.asarray(each[name], np.float64) for each in (scores, others))
        wins = np.sign(a[:, None] - b) / 2 + 0.5
        whole.append(float(wins.mean()))
        again.append(((rows @ wins) * columns).sum(1))
    low, high = _quantiles(np.mean(again, 0), level)
    count = sum(len(scores[name]) for name in shared)
    return Estimate(fmean(whole), low, high, count, count)


@functools.lru_cache(maxsize=2)
def _shares(counts: tuple[tuple[int, int], ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each condition, with so many seeds of either method: the share that each seed has of a resample,
    [resamples, seeds]."""
    draws, found = np.random.default_rng(0), []
    for each in counts:
        rows, columns = (draws.multinomial(count, np.full(count, 1 / count), RESAMPLES) / count for count in each)
        found.append((rows, columns))
    return found


def _estimates(scores: Scores, statistics: Callable[[np.ndarray], list[np.ndarray]], level: float) -> list[Estimate]:
    """Of several statistics of the same runs, resampled once for all."""
    known = [np.asarray(values, np.float64) for values in scores.values() if len(values)]
    if not known:
        raise ValueError("no number to take a mean of")
    every = np.concatenate(known)
    whole, again = statistics(every), statistics(every[_places(tuple(map(len, known)))])
    found = [(float(mean), *_quantiles(values, level)) for mean, values in zip(whole, again, strict=True)]
    return [Estimate(*each, len(every), len(every)) for each in found]


@functools.lru_cache(maxsize=2)
def _places(counts: tuple[int, ...]) -> np.ndarray:
    """Draws from conditions with so many seeds each, [resamples, all seeds]: places among the seeds of all, in turn."""
    draws, firsts = np.random.default_rng(0), np.cumsum((0, *counts[:-1]))
    drawn = [draws.integers(count, size=(RESAMPLES, count)) for count in counts]
    return np.concatenate([first + each for first, each in zip(firsts, drawn, strict=True)], 1)


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
