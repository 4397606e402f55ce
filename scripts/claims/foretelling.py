"""Which number foretells a collapse? ROC over all learners of some studies, those with bad learning rates included.

At each look at a learner that has learned something and has not fallen, its signs (`lagging.SIGNS`) are held against
what comes: does its held-out reward fall later on? `auc` is the chance that a look before a fall has the
larger sign than one that is not (.5: no information), turned so that it is at least .5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata

from ..comparison import Estimate
from .lagging import SIGNS

LEARNED, FALL, STANDING = 0.4, 0.15, 0.05
"""Reward that counts as learned; loss of reward, below the best so far, that counts as a fall; what still stands."""
FEWEST = 5
"""Learners that fall, below which nothing is said."""
NAMES = ("batch reward", *SIGNS)
RESAMPLES = 300


class Foretold(NamedTuple):
    """A sign, whether it is large or small before a fall, and its area under the ROC curve (interval over learners)."""

    sign: str
    before: str
    auc: Estimate


def collapsed(curve: Sequence[Sequence[float]], fall: float = FALL) -> bool:
    """Whether the reward at the end is this far below the largest on the way, of a curve of `lagging.train`."""
    rewards = [entry[1] for entry in curve]
    return max(rewards) - rewards[-1] > fall


def looks(curve: Sequence[Sequence[float]]) -> list[tuple[bool, list[float]]]:
    """(falls later, signs) of each look at a learner that could foretell something."""
    rewards, found = [entry[1] for entry in curve], []
    for place in range(len(curve) - 1):
        best = max(rewards[: place + 1])
        if best >= LEARNED and rewards[place] >= best - STANDING:
            falls = min(rewards[place + 1 :]) < best - FALL
            found.append((falls, list(curve[place][2:])))
    return found


def auc(falls: np.ndarray, values: np.ndarray) -> float:
    """Area under the ROC curve of `values` [N] for `falls` bool [N]; NaN with one kind only."""
    yes = int(falls.sum())
    no = len(falls) - yes
    if not yes or not no:
        return float("nan")
    return float((rankdata(values)[falls].sum() - yes * (yes + 1) / 2) / (yes * no))


def foretold(curves: Iterable[Sequence[Sequence[float]]]) -> tuple[list[Foretold], int, int]:
    """Every sign, the best first (none if too few fall); how many learners have such looks, and how many of them fall.
    Learners are resampled, not looks."""
    learners = [found for curve in curves if (found := looks(curve))]
    falls = [np.array([fell for fell, _ in found]) for found in learners]
    signs = [np.array([values for _, values in found]) for found in learners]
    fallen = sum(bool(each.any()) for each in falls)
    if fallen < FEWEST:
        return [], len(learners), fallen
    every = np.concatenate(falls)
    draws = np.random.default_rng(0).integers(len(learners), size=(RESAMPLES, len(learners)))
    told: list[Foretold] = []
    for column, name in enumerate(NAMES):
        values = [np.nan_to_num(each[:, column], posinf=1e30, neginf=-1e30) for each in signs]
        whole = auc(every, np.concatenate(values))
        again = [auc(*(np.concatenate([each[i] for i in draw]) for each in (falls, values))) for draw in draws]
        turned = [value if whole >= 0.5 else 1 - value for value in (whole, *np.nanquantile(again, [0.025, 0.975]))]
        estimate = Estimate(turned[0], min(turned[1:]), max(turned[1:]), len(learners), len(learners))
        told.append(Foretold(name, "large" if whole >= 0.5 else "small", estimate))
    return sorted(told, key=lambda one: -one.auc.mean), len(learners), fallen
