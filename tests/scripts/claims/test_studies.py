"""Tuning and keeping results: one grid for all, fresh seeds, no work twice; and the exact sums of the single arm."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from learners.losses.corrections import exact
from learners.losses.delightful import dg
from learners.losses.weighted import reinforce
from scripts.claims.single_arm import gradients, moments, policy
from scripts.claims.studies import Cell, Study, best_rates, estimates, percent_table, rates_used, same_algorithm

RIGHT_RATE = {"a": 0.1, "b": 0.2}


@pytest.fixture
def study(tmp_path):
    return Study(tmp_path, ("a", "b"), (0.1, 0.2, 0.4), (0, 1), (7, 8, 9), tuned_by="error")


def measured(cells):
    measured.asked.append(list(cells))
    return [{"error": abs(cell.rate - RIGHT_RATE[cell.algorithm]) + cell.seed / 100} for cell in cells]


def test_every_algorithm_is_tuned_on_the_same_grid_and_measured_with_fresh_seeds(study):
    measured.asked = []
    rows = study.run("c", measured, {})
    tuning, fresh = measured.asked
    assert {(cell.rate, cell.seed) for cell in tuning if cell.algorithm == "a"} == {
        (rate, seed) for rate in (0.1, 0.2, 0.4) for seed in (0, 1)
    }
    assert [replace(cell, algorithm="a") for cell in tuning[:6]] == [replace(c, algorithm="a") for c in tuning[6:]]
    assert fresh == [Cell(name, RIGHT_RATE[name], seed) for name in "ab" for seed in (7, 8, 9)]
    assert best_rates(rows, "error") == RIGHT_RATE
    assert rates_used(rows) == {"a": {"c": 0.1}, "b": {"c": 0.2}}
    assert estimates(rows, "error")["a"]["c"].mean == pytest.approx(0.08)
    assert "8.00 [" in percent_table(rows, "error") and "@1e-1" in percent_table(rows, "error")


def test_a_condition_is_measured_once_unless_its_settings_change(study):
    measured.asked = []
    first = study.run("c", measured, {"steps": 1})
    assert study.run("c", measured, {"steps": 1}) == first and len(measured.asked) == 2
    study.run("c", measured, {"steps": 2})
    assert len(measured.asked) == 4
    study.run("c", measured, {"steps": 2}, {"a": 0.4, "b": 0.4})
    assert [len(cells) for cells in measured.asked[4:]] == [6], "rates tuned elsewhere are not tuned again"


def test_seeds_that_are_reported_are_not_tuned_on(tmp_path):
    with pytest.raises(ValueError, match="reported"):
        Study(tmp_path, ("a",), (0.1,), (0, 1), (1, 2), tuned_by="error")


def test_neighbours_with_the_same_algorithm():
    cells = [Cell(name, 0.1, seed) for name in "ab" for seed in range(3)]
    assert list(same_algorithm(cells)) == [("a", slice(0, 3)), ("b", slice(3, 6))]
    assert list(same_algorithm(cells, 2)) == [
        ("a", slice(0, 2)), ("a", slice(2, 3)), ("b", slice(3, 5)), ("b", slice(5, 6)),
    ]  # fmt: skip


def test_gradients_of_the_single_arm_are_those_of_the_formula():
    now = policy(0.3, 0)
    rewards = torch.eye(10, dtype=torch.float64)[0] - 0.5
    expected = rewards[:, None] * (torch.eye(10, dtype=torch.float64) - now)
    torch.testing.assert_close(gradients(reinforce, now, now), expected)
    gate = torch.sigmoid(-rewards * now.log())
    torch.testing.assert_close(gradients(dg, now, now), gate[:, None] * expected)


def test_exact_weights_have_cosine_one_and_dg_crushes_the_second_moment():
    stale, now = torch.full((10,), 0.1, dtype=torch.float64), policy(0.9, 0)
    second, cosine = moments(exact(reinforce), now, stale)
    assert cosine == pytest.approx(1.0)
    plain, _ = moments(reinforce, now, stale)
    gated, _ = moments(partial(dg, gate_temperature=0.5), now, stale)
    assert second < plain / 10 and gated < plain / 1000
