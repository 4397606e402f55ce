"""Interquartile means, profiles, chances of improvement and pairs, against definitions and the truth they cover."""

import numpy as np
import pytest
from scipy.stats import mannwhitneyu

from scripts.analysis.aggregates import holm, improvement, iqm, pairwise, profile


def test_the_interquartile_mean_leaves_out_a_quarter_of_all_runs_at_either_end() -> None:
    found = iqm({"a": [0.0, 1.0, 2.0, 3.0], "b": [-100.0, 4.0, 5.0, 100.0]})
    assert found.mean == np.mean([1.0, 2.0, 3.0, 4.0]) and found.count == 8
    assert found.low < found.mean < found.high
    with pytest.raises(ValueError, match="no number"):
        iqm({"a": []})


def test_seeds_are_drawn_within_a_condition_so_conditions_far_apart_do_not_widen_the_interval() -> None:
    apart = iqm({"a": [0.0] * 5, "b": [1.0] * 5})
    assert (apart.low, apart.mean, apart.high) == (0.5, 0.5, 0.5)


def test_its_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    draws = np.random.default_rng(3)
    held = 0
    for _ in range(100):
        found = iqm({name: draws.normal(size=10) for name in "abc"})
        held += found.low <= 0 <= found.high
    assert 88 <= held <= 99


def test_a_profile_is_the_share_of_runs_above_each_threshold() -> None:
    shares = profile({"a": [0.1, 0.5], "b": [0.5, 0.9]}, [0.0, 0.5, 1.0])
    assert [share.mean for share in shares] == [1.0, 0.25, 0.0]
    assert (shares[0].low, shares[0].high) == (1.0, 1.0)


def test_the_chance_of_improvement_is_that_of_mann_and_whitney_over_the_conditions() -> None:
    draws = np.random.default_rng(4)
    first = {name: draws.normal(0.5, size=6).round(1).tolist() for name in "ab"}
    other = {name: draws.normal(0.0, size=8).round(1).tolist() for name in "ab"}
    found = improvement(first, other)
    wanted = np.mean([mannwhitneyu(first[name], other[name]).statistic / 48 for name in "ab"])
    assert found.mean == pytest.approx(wanted) and found.low < wanted < found.high
    assert improvement(other, first).mean == pytest.approx(1 - wanted)
    with pytest.raises(ValueError, match="without a condition in common"):
        improvement({"a": [1.0]}, {"b": [1.0]})


def test_every_pair_is_tested_by_seed_and_corrected_for_their_number() -> None:
    base = {seed: float(seed) for seed in range(10)}
    better = {seed: value + 1 + seed / 100 for seed, value in base.items()}
    pairs = pairwise({"base": base, "better": better, "less": {seed: base[seed] for seed in range(3)}})
    assert [(pair.first, pair.second) for pair in pairs] == [("base", "better"), ("base", "less"), ("better", "less")]
    assert pairs[0].found.difference == pytest.approx(1.045)
    assert pairs[0].found.p == pytest.approx(2 / 1024) and pairs[0].p == pytest.approx(3 * 2 / 1024)
    assert pairs[1].p == 1.0 and pairs[2].found.prompts == 3


def test_holms_correction() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
