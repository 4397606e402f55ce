"""Intervals against SciPy and against the truth that they claim to cover; bands, tables."""

import math

import numpy as np
import pytest

from scripts.analysis.intervals import CURVE_POINTS, Estimate, band, bootstrap, markdown_table


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def test_with_five_seeds_it_holds_the_truth_nearly_as_often_as_it_says() -> None:
    """The plain percentile interval would cover it in 84 % of cases. Each point of a band is a draw of its own."""
    places = range(CURVE_POINTS)
    bands = [band([(places, draw) for draw in draws]) for draws in rng().normal(size=(20, 5, CURVE_POINTS))]
    held = np.mean([(low <= 0) & (high >= 0) for *_, low, high in bands])
    assert 0.90 <= held <= 0.97


def test_a_missing_number_is_left_out_and_counted() -> None:
    found = bootstrap([1.0, None, 3.0, math.nan])
    assert (found.mean, found.n, found.asked) == (2.0, 2, 4)
    assert str(found).endswith("(2 of 4)")
    shown = [bootstrap(values) for values in ([None], [5.0], [0.5, 0.5, 0.5], [0.0, 0.0])]
    assert [str(each) for each in shown] == ["- (0 of 1)", "5.00", "0.500 [0.500, 0.500]", "0.000 [0.000, 0.000]"]
    assert str(Estimate(950.4, -1.26, 2000.0, 3, 3)) == "950 [-1, 2,000]"


def test_a_band_is_the_mean_where_all_curves_are() -> None:
    x, mean, low, _ = band([([0, 10], [0.0, 10.0]), ([0, 5, 20], [2.0, 7.0, 22.0])])
    assert (x[0], x[-1]) == (0, 10)
    assert mean == pytest.approx(x + 1)
    assert low == pytest.approx(x, abs=1e-9)
    assert np.isnan(band([([0, 1], [0, 1])])[2]).all()


def test_a_table_in_markdown() -> None:
    rows = [["ppo", Estimate(0.5, 0.25, 0.75, 3, 3)], ["a|b", None], ["dg", 12345.6]]
    assert markdown_table(["loss", "reward"], rows) == (
        "| loss | reward               |\n"
        "| ---- | -------------------- |\n"
        "| ppo  | 0.500 [0.250, 0.750] |\n"
        "| a\\|b | -                    |\n"
        "| dg   | 12,346               |\n"
    )
