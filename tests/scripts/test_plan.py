"""The planner: splits, choices, a search over simulations, the command and the config that it writes."""

import json
from dataclasses import replace

import pytest

from areal_like.config import run_config as configs
from scripts.plan import Choice, Planner, choices, main
from scripts.simulation import costs
from scripts.simulation.run import Simulation

BASE = "configs/bench/modes.yaml"
KEYS = [BASE, "groups_per_batch=8", "engine.median=60", "engine.sigma=0.6", "learner.base=0.002"]
START = Choice(2, 2, 4.0)


def planner():
    def load(overrides):
        return configs.load([*KEYS, "run.steps=3", "engine.slots=16", *overrides])

    return Planner(load, costs.of_timed(load([])))


def test_the_search_finds_the_side_that_limits(capsys):
    found = planner().best([replace(START, bound=-1.0), *choices(4, [1.0, 4.0])])
    assert "bound -1: left out" in capsys.readouterr().err
    assert found[0].choice.actors == 3 and found[0].choice.bound is not None  # training is cheap
    assert {(plan.choice.bound, plan.choice.tail) for plan in found} >= {(None, False), (None, True), (1.0, False)}


def test_the_command_has_a_sync_row_and_lags_in_train_steps(tmp_path, capsys):
    out = tmp_path / "plan.yaml"
    words = [*KEYS, "--gpus", "3", "--staleness", "2", "--steps", "3", "--best", "1"]
    assert main([*words, "--out", str(out), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any(each["mode"].startswith("sync") for each in found[:2])
    assert all(each["lag_mean"] >= each["staleness_mean"] for each in found)
    config = configs.load([str(out), "run.steps=40"])
    cost = costs.scaled(costs.of_timed(config), found[0]["learner_gpus"])
    again = Simulation(config, cost).run()
    assert again.figures["samples_per_second"] == pytest.approx(found[0]["samples_per_second"], rel=0.1)
    for wrong in (["--gpus", "1"], ["--gpus", "4", "--staleness", "0.5"]):
        with pytest.raises(SystemExit):
            main([*KEYS, *wrong])
