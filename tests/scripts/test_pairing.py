"""Comparisons prompt by prompt against counts that were worked out by hand, and against simulation."""

import itertools
from math import comb

import numpy as np
import pytest

from scripts.eval import MCNEMAR, PERMUTATION, paired


def test_right_and_wrong_answers_get_mcnemars_exact_test() -> None:
    # 20 prompts: 9 become right, 2 wrong, 5 stay right, 4 wrong
    before, after = [0] * 9 + [1] * 2 + [1] * 5 + [0] * 4, [1] * 9 + [0] * 2 + [1] * 5 + [0] * 4
    found = paired(before, after)
    assert (found.before, found.after, found.better, found.worse) == (7 / 20, 14 / 20, 9, 2)
    assert found.p == pytest.approx(2 * sum(comb(11, k) for k in range(3)) / 2**11) and found.test == MCNEMAR
    assert found.difference == pytest.approx(7 / 20) and found.low < 7 / 20 < found.high
    back = paired(after, before)
    assert (back.p, back.low, back.high) == pytest.approx((found.p, -found.high, -found.low))


def test_what_does_not_differ_is_not_significant_and_not_certain() -> None:
    same = paired([0, 1, 1, 0], [0, 1, 1, 0])
    assert same.p == 1.0 and same.low < -0.2 and same.high > 0.2, "four prompts that agree do not say much"
    assert paired([0.5, 0.25], [0.5, 0.25]).p == 1.0
    assert paired([0.5, 0.25, 0.25], [0.5, 0.25, 0.5]).p == 1.0, "one prompt alone could have moved either way"


def test_other_numbers_get_the_share_of_flipped_signs_that_are_as_extreme() -> None:
    before, after = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.6, 0.2, 0.5, 0.3, 0.9, 0.85]
    changes = np.subtract(after, before)
    means = [abs(np.mean(changes * signs)) for signs in itertools.product([1, -1], repeat=6)]
    found = paired(before, after)
    assert found.p == pytest.approx(np.mean(np.array(means) >= abs(changes.mean()) - 1e-12)), "all 64 flips, exactly"
    assert found.test == PERMUTATION and (found.better, found.worse) == (4, 1)
    assert found.low <= found.difference <= found.high


def test_intervals_of_proportions_hold_the_truth() -> None:
    draw, held, times = np.random.default_rng(1), 0, 1000
    for _ in range(times):
        kind = draw.choice(4, p=[0.15, 0.05, 0.5, 0.3], size=60)  # better, worse, both right, both wrong
        before, after = np.isin(kind, (1, 2)) * 1.0, np.isin(kind, (0, 2)) * 1.0
        found = paired(before, after)
        held += found.low <= 0.1 <= found.high
    assert 930 <= held <= 980
