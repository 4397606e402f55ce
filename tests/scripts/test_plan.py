"""The planner: splits, choices, a search over simulations, the command and the config that it writes."""

import json
from dataclasses import replace

import pytest

from areal_like.config import run_config as configs
from scripts.plan import Choice, Planner, main, splits
from scripts.simulation import costs
from scripts.simulation.run import Simulation

BASE = "configs/bench/modes.yaml"
KEYS = [BASE, "groups_per_batch=8", "engine.median=60", "engine.sigma=0.6", "learner.base=0.002"]
START = Choice(4, 4, 4.0, 16, 1)


def planner(**options):
    def load(overrides):
        return configs.load([*KEYS, "run.steps=3", "engine.slots=16", *overrides])

    return Planner(load, costs.of_timed(load([])), **options)


def test_splits_leave_the_learner_the_gpus_that_it_needs():
    assert splits(8) == [1, 2, 3, 4, 5, 6, 7] and splits(2) == [1]


def test_choices_differ_in_one_knob_and_keep_the_bound_in_train_steps():
    found = list(planner()._around(START, splits(8)))
    assert {(each.actors, each.learner) for each in found} == {(3, 5), (4, 4), (5, 3)}
    assert {each.slots for each in found} == {8, 16, 32}
    assert {(each.bound, each.interval) for each in found} == {(4.0, 1), (2.0, 2), (1.0, 4)}
    sync = list(planner()._around(replace(START, bound=None), [4]))
    assert {(each.tail, each.interval) for each in sync} == {(False, 1), (True, 1)}


def test_the_search_finds_the_side_that_limits_and_keeps_to_what_is_allowed():
    found, wrong = planner(most_stale=1.0), replace(START, bound=-1.0)
    assert found._plan(wrong) is None and wrong in found.left_out
    found.search(4, [1.0, 4.0])
    best = found.best()
    assert best[0].choice.actors == 3 and best[0].choice.bound is not None  # training is cheap
    assert {plan.choice.bound for plan in found.made.values()} >= {None, 1.0, 4.0}
    assert all(plan.figures["lag_mean"] <= 1.0 for plan in best)


def test_the_command_has_a_sync_row_and_lags_in_train_steps(tmp_path, capsys):
    out = tmp_path / "plan.yaml"
    words = [*KEYS, "--gpus", "3", "--staleness", "2", "--steps", "3", "--best", "1"]
    assert main([*words, "--out", str(out), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any(each["mode"].startswith("sync") for each in found[:2])
    assert all(each["lag_mean"] >= each["staleness_mean"] * each["weight_sync_interval"] for each in found)
    config = configs.load([str(out), "run.steps=40"])
    cost = costs.scaled(costs.of_timed(config), found[0]["learner_gpus"])
    again = Simulation(config, cost).run()
    assert again.samples_per_second == pytest.approx(found[0]["samples_per_second"], rel=0.1)
    for wrong in (["--gpus", "1"], ["--gpus", "4", "--most-stale", "-1"], ["--gpus", "4", "--staleness", "0.5"]):
        with pytest.raises(SystemExit):
            main([*KEYS, *wrong])
