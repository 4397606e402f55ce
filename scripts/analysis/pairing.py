"""Two models on the same prompts: what changed, and whether chance alone would do as much. Pure.

The unit is the prompt, with one number for each model: the mean of its answers, or its pass@k. So eight answers to a
prompt are not taken for eight prompts. The tests speak of prompts of this kind, not of training seeds.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich.table import Table

from areal_like.estimates import Z, interval_of_any

from ..console.output import shortened, table

RESAMPLES = 9999
BATCH = 500
"""Resamples that lie in memory as numbers at a time: prompts may be thousands."""
_EQUAL = 100 * np.finfo(np.float64).eps
"""Means that differ by this share differ by rounding."""
MCNEMAR, PERMUTATION = "McNemar", "permutation"
TESTS = {
    MCNEMAR: "McNemar's exact test: each prompt is right or wrong",
    PERMUTATION: "permutation test of the mean difference over prompts",
}


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
    (exact up to 13 prompts, else 9999 draws, the same ones every time), and the bootstrap over prompts. Unlike
    Wilcoxon's test it asks about the mean, which is what is reported; of 0 and 1 it would be McNemar's.
    Raises ValueError for unequal numbers of prompts, or none.
    """
    if len(before) != len(after) or not len(before):
        raise ValueError(f"{len(before)} prompts before, {len(after)} after: want the same ones, and at least one")
    from scipy.stats import binomtest

    pair = np.asarray(before, np.float64), np.asarray(after, np.float64)
    changes = pair[1] - pair[0]
    better, worse = int((changes > 0).sum()), int((changes < 0).sum())
    if np.isin(pair, (0.0, 1.0)).all():
        p = float(binomtest(better, better + worse).pvalue) if better + worse else 1.0
        (low, high), test = _of_proportions(len(changes), better, worse), MCNEMAR
    else:
        (low, high), test, p = interval_of_any(changes.tolist()), PERMUTATION, _flipped(changes)
    first, second = (float(each.mean()) for each in pair)
    return Paired(len(changes), first, second, float(changes.mean()), low, high, better, worse, p, test)


def _of_proportions(prompts: int, better: int, worse: int) -> tuple[float, float]:
    up, down = (better + 1) / (prompts + 2), (worse + 1) / (prompts + 2)
    spread = Z * math.sqrt((up + down - (up - down) ** 2) / (prompts + 2))
    return max(-1.0, up - down - spread), min(1.0, up - down + spread)


def _flipped(changes: np.ndarray) -> float:
    """p of the mean of these differences, if each could as well have the other sign: what
    `scipy.stats.permutation_test` finds, which makes the same flips anew each time, in ten to thirty times the time."""
    moved = changes[changes != 0.0]
    if len(moved) < 2:
        return 1.0  # one prompt alone could as well have moved the other way
    signs, mean = _signs(len(moved)), float(moved.mean())
    means = np.concatenate([part @ moved for part in np.split(signs, range(BATCH, len(signs), BATCH))]) / len(moved)
    equal, drawn = _EQUAL * abs(mean), len(signs) == RESAMPLES  # with those drawn counts the one that was seen
    fewest = min(int((means <= mean + equal).sum()), int((means >= mean - equal).sum()))
    return min(1.0, 2 * (fewest + drawn) / (len(signs) + drawn))


@functools.lru_cache(maxsize=2)
def _signs(count: int) -> np.ndarray:
    """Flips of this many signs, int8 [flips, count]: all that there are, or `RESAMPLES` that are drawn."""
    if 2**count <= RESAMPLES:
        return np.array(list(itertools.product((1, -1), repeat=count)), np.int8)
    draws, flips = np.random.RandomState(0), np.empty((RESAMPLES, count), np.int8)
    for first in range(0, RESAMPLES, BATCH):
        part = flips[first : first + BATCH]
        pairs = draws.random((*part.shape, 2))
        part[:] = np.where(pairs[..., 0] <= pairs[..., 1], 1, -1)
    return flips


def pairs_of(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> dict[str, Paired]:
    """Figure → its comparison; both have the same figures, a number per prompt (`estimates.by_prompt`)."""
    return {name: paired(before[name], after[name]) for name in before}


def compared(title: str, names: tuple[str, str], sets: Mapping[str, Mapping[str, Paired]]) -> Table:
    """The table of all sets. `names`: of the first and of the second model."""
    found = [(name, figure, pair) for name, figures in sets.items() for figure, pair in figures.items()]
    # A set's name is told once, in the first of its rows.
    made = table(title, "set", "figure", "prompts", *names, "difference [95 %]", "better", "worse", "p")
    before = ""
    for name, figure, pair in found:
        cells = [
            f"{pair.before:.3f}",
            f"{pair.after:.3f}",
            f"{pair.difference:+.3f} [{pair.low:+.3f}, {pair.high:+.3f}]",
        ]
        counts = [str(pair.better), str(pair.worse), p_value(pair.p)]
        made.add_row(shortened(name, 40) if name != before else "", figure, str(pair.prompts), *cells, *counts)
        before = name
    return made


def p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def meaning_of_p(pairs: Iterable[Paired]) -> str:
    """What the column p is, in words."""
    used = {pair.test for pair in pairs}
    return "p: " + "; else ".join(TESTS[test] for test in TESTS if test in used)
