"""Two models on the same prompts: how they differ, and whether chance alone would do as much. Pure.

The unit is the prompt, with one number for each model: the mean of its answers, or its pass@k. So eight answers to a
prompt are not taken for eight prompts. The tests are about prompts of this kind, not about training seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich.table import Table

from areal_like.estimates import Z, interval_of_any

from ..console.output import shortened, table

RESAMPLES, BATCH = 9999, 500
"""Flips of all signs that are drawn, and how many of them are in memory at a time."""
MCNEMAR, PERMUTATION = "McNemar", "permutation"


class Paired(NamedTuple):
    """Means before and after, their difference with its interval of 95 %, on how many prompts the second model is
    `better` and on how many `worse`, and the two-sided p of `test`."""

    prompts: int
    before: float
    after: float
    difference: float
    low: float
    high: float
    better: int
    worse: int
    p: float
    test: str


def paired(before: Sequence[float], after: Sequence[float]) -> Paired:
    """Compare two models by a number for each prompt, in the same order.

    Of numbers that are all 0 or 1: McNemar's exact test, and Bonett and Price's interval (2012, adjusted Wald), which
    stays wide where nearly all prompts agree. Of others: a permutation test that flips the signs of the differences
    (exact up to 13 prompts, else 9999 draws, the same ones every time), and the bootstrap over prompts.
    """
    from scipy.stats import binomtest, permutation_test

    pair = np.asarray([before, after], np.float64)
    changes = pair[1] - pair[0]
    better, worse, p = int((changes > 0).sum()), int((changes < 0).sum()), 1.0
    if np.isin(pair, (0.0, 1.0)).all():
        if better + worse:
            p = float(binomtest(better, better + worse).pvalue)
        (low, high), test = _of_proportions(len(changes), better, worse), MCNEMAR
    else:
        if better + worse > 1:  # one prompt alone could as well have moved the other way
            flipped = {"permutation_type": "samples", "n_resamples": RESAMPLES, "batch": BATCH, "random_state": 0}
            p = float(permutation_test((changes[changes != 0.0],), np.mean, **flipped).pvalue)
        (low, high), test = interval_of_any(changes.tolist()), PERMUTATION
    return Paired(len(changes), *pair.mean(1).tolist(), float(changes.mean()), low, high, better, worse, p, test)


def _of_proportions(prompts: int, better: int, worse: int) -> tuple[float, float]:
    up, down = (better + 1) / (prompts + 2), (worse + 1) / (prompts + 2)
    spread = Z * math.sqrt((up + down - (up - down) ** 2) / (prompts + 2))
    return max(-1.0, up - down - spread), min(1.0, up - down + spread)


def table_of(title: str, sets: Mapping[str, Mapping[str, Paired]]) -> Table:
    """A row per set and figure."""
    made = table(title, "set", "figure", "difference", "low", "high", "better", "worse", "p")
    for name, figures in sets.items():
        label = shortened(name, 14)
        for figure, pair in figures.items():
            numbers = (f"{value:+.3f}" for value in (pair.difference, pair.low, pair.high))
            p = "< 0.001" if pair.p < 0.001 else f"{pair.p:.3f}"
            made.add_row(label, figure, *numbers, str(pair.better), str(pair.worse), p)
            label = ""
    return made
