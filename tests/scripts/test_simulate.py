"""The simulator: arithmetic where lengths are equal, all modes with the production buffer, costs, the command. The
planner: splits, choices, a search over simulations, the command and the config that it writes."""

import itertools
import json
import random
from dataclasses import replace

import numpy as np
import pytest

from actors.engines.step_costs import StepCosts
from areal_like.config import run_config as configs
from scripts.plan import Choice, Planner, choices
from scripts.plan import main as plan
from scripts.simulate import main
from scripts.simulation import costs
from scripts.simulation.actors import World
from scripts.simulation.run import Simulation, Stuck

BASE = "configs/bench/modes.yaml"
LONGTAIL = ["engine.median=60", "engine.sigma=1.0", "engine.noise=0.3", "learner.base=0.105", "actors.count=2"]
EXACT = costs.Costs(
    costs.Engine(base=0.001, slots=64),
    costs.Answers(median=100, sigma=0, noise=0, prompt=8),
    costs.LearnerCost(base=0.2),
    latency=0.0,
    buffer=0.0,
)


def run(*overrides, cost=None, history=0):
    config = configs.load([BASE, *overrides])
    return Simulation(config, cost or costs.of_timed(config), history).run()


def test_equal_lengths_come_to_what_arithmetic_says():
    """128 samples per step on 2 · 64 slots: 0.1 s of decoding and 0.2 s of training in turns, or at once."""
    sync = run("mode=sync", "actors.count=2", cost=EXACT)
    assert sync.figures["samples_per_second"] == pytest.approx(128 / 0.3, rel=0.01) and max(sync.staleness) == 0
    idle = [sync.figures[f"{side}_idle_share"] for side in ("actor", "learner")]
    assert idle == pytest.approx([2 / 3, 1 / 3], abs=0.02)
    both = run("scheduler.max_staleness=2", "actors.count=2", cost=EXACT)
    assert both.figures["samples_per_second"] == pytest.approx(128 / 0.2, rel=0.01)
    assert both.figures["learner_idle_share"] < 0.02 and set(both.staleness) <= {0, 1, 2}


@pytest.mark.parametrize(
    "overrides",
    [
        ["mode=sync", "scheduler.oversample_prompts=1.25", "scheduler.oversample_responses=1.25"],
        ["scheduler.max_staleness=1", "weight_sync_interval=2"],
        ["scheduler.max_staleness=4"],
        ["scheduler.max_staleness=inf", "eval.every=2", "eval.prompts=8"],
    ],
)
def test_every_mode_ends_within_its_bound_and_loses_no_group(overrides):
    config = configs.load([BASE, *LONGTAIL, "run.steps=8", *overrides])
    simulation = Simulation(config, costs.of_timed(config))
    outcome, bound = simulation.run(), config.scheduler.get("max_staleness", 0)
    assert outcome.staleness.total() == 8 * 128 and max(outcome.staleness) <= bound
    ledger = simulation.learner.report["ledger"]
    left = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
    assert ledger["admitted"] == left
    assert max(outcome.lags) <= config.weight_sync_interval * (max(outcome.staleness) + 1) - 1


def test_every_sample_has_an_injected_age():
    """Training is quick: without it most samples would be younger."""
    found = run(*LONGTAIL, "learner.base=0.002", "run.steps=8", "inject_staleness=3")
    assert found.staleness == {0: 128, 1: 128, 2: 128, 3: 5 * 128}


def test_async_at_zero_is_sync_and_a_bound_lets_others_begin_before_the_longest_ends():
    a, b, c = (
        run(*LONGTAIL, words) for words in ("mode=sync", "scheduler.max_staleness=0", "scheduler.max_staleness=4")
    )
    assert a.figures == b.figures and c.figures["samples_per_second"] > 2.5 * a.figures["samples_per_second"]


def test_histories_repeat_and_differ():
    a, again, other = (run(*LONGTAIL, "scheduler.max_staleness=4", history=history).figures for history in (1, 1, 2))
    assert a == again and a != other
    world = World(None, costs.Costs(sample=costs.Sample(jitter=1.0)), None, 0, random.Random(0))
    assert np.mean([world.pace() for _ in range(2000)]) == pytest.approx(1.0, abs=0.1)


def test_a_run_that_makes_no_progress_is_stuck(monkeypatch):
    monkeypatch.setattr("scripts.simulation.run.STUCK_EVENTS", 1000)
    cost = costs.Costs(costs.Engine(slots=8), costs.Answers(20, right=1.0, prompt=8))
    with pytest.raises(Stuck):
        run("filter.name=zero_variance", "sizing.group_size=2", cost=cost)


def test_actors_of_a_source_share_its_link():
    weights = costs.WeightsCost(fetch=1.0, size=100.0, link=100.0)
    assert [weights.seconds(place, 10, 2, 1) for place in (0, 1, 2, 5, 6)] == [3.0, 3.0, 5.0, 5.0, 7.0]
    assert weights.seconds(9, 10, 0, 2) == 1.0 + 10 / 2


@pytest.mark.parametrize(
    "text, key",
    [
        ("engine: {base: 0}", "engine"),
        ("engine: {speed: 1}", "speed"),
        ("answers: {trace: [[]]}", "trace"),
    ],
)
def test_costs_that_make_no_sense_are_refused(text, key, tmp_path):
    (tmp_path / "costs.yaml").write_text(text)
    with pytest.raises(configs.ConfigError, match=key):
        costs.read(tmp_path / "costs.yaml")


@pytest.mark.parametrize("words", [[BASE, "replay=a"], [BASE, "resume=auto"]])
def test_runs_without_rollouts_are_refused(words):
    config = configs.load([*words, "run.target_reward=null"])
    with pytest.raises(configs.ConfigError, match=words[1].split("=")[0]):
        Simulation(config, EXACT)


def made(folder, steps=60, base=0.05, per_token=1e-5):
    """A run folder whose decode steps cost 1 ms + 20 us per sequence + 0.1 us per token."""
    config = configs.load(["quickstart"])
    configs.save(config, folder / "config.yaml")
    tokens = 1000 + 100 * (np.arange(1, steps + 1) % 7)
    rates = np.cumsum(tokens) / np.cumsum(base + per_token * tokens + 0.01)
    row = {"step": 1, "train/idle_share": 0.0, "reward/mean": 0.25, "publish/seconds": 0.004}
    rows = [row | {"tokens": int(n), "train/tokens_per_second": rate} for n, rate in zip(tokens, rates, strict=True)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counted, now = StepCosts(), 0.0
    for sequences, tokens in itertools.product((64, 40, 20, 7, 3, 1), (100, 900)):
        counted.begin(now, sequences, sequences * tokens)
        now += 1e-3 + 2e-5 * sequences + 1e-7 * sequences * tokens
        counted.end(now)
    counted.prefilled(100, 0.02)
    counted.lengths.extend([[5, 6]] * 20)
    counted.write(folder, "actor-0")
    return folder


def test_costs_come_back(tmp_path):
    found = costs.fitted(made(tmp_path))
    assert (found.engine.base, found.engine.per_sequence, found.engine.per_token) == pytest.approx((1e-3, 2e-5, 1e-7))
    assert (found.learner.base, found.learner.per_token) == pytest.approx((0.056, 1e-5), rel=1e-3)
    assert found.learner.publish == pytest.approx(0.004)
    assert found.engine.prefill == pytest.approx(2e-4) and found.answers.trace == [[5, 6]] * 20
    assert found.answers.right == 0.25 and "decode step 0%, train step 0%" in found.source
    (tmp_path / "costs.yaml").write_text(costs.written(found))
    assert costs.read(tmp_path / "costs.yaml") == found
    with pytest.raises(configs.ConfigError, match="expected at least 50"):
        costs.fitted(made(tmp_path, steps=49))


def test_a_fit_has_no_negative_costs_and_tells_its_error():
    columns = np.array([[1.0, 1.0, 1.0], [1.0, 2.0, 3.0], [4.0, 2.0, 3.0]])
    found, error = costs.fit(columns @ columns.T)
    assert found == pytest.approx([3.0, 0.0]) and error == pytest.approx(np.sqrt(2 / 29))


def test_the_command_compares_with_a_run(tmp_path, capsys):
    rows = [{"step": n, "seconds": 0.3 * n, "staleness/histogram": {"1": 128}} for n in range(1, 17)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"staleness_mean": 1.0, "actor_idle_share": 0.2, "learner_idle_share": 0.5, "seconds": 4.8}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    words = [BASE, *LONGTAIL, "scheduler.max_staleness=1", "--against", str(tmp_path)]
    assert main([*words, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"]["samples_per_second"] == pytest.approx(128 / 0.3)
    assert found["simulated"].keys() == found["measured"].keys()
    for wrong in (["quickstart"], [BASE, "--costs-from", str(tmp_path / "none")]):
        with pytest.raises(SystemExit):
            main(wrong)
    assert "--costs" in capsys.readouterr().err


PLANNED = "configs/bench/modes.yaml"
KEYS = [PLANNED, "groups_per_batch=8", "engine.median=60", "engine.sigma=0.6", "learner.base=0.002"]
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
    assert plan([*words, "--out", str(out), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any(each["mode"].startswith("sync") for each in found[:2])
    assert all(each["lag_mean"] >= each["staleness_mean"] for each in found)
    config = configs.load([str(out), "run.steps=40"])
    cost = costs.scaled(costs.of_timed(config), found[0]["learner_gpus"])
    again = Simulation(config, cost).run()
    assert again.figures["samples_per_second"] == pytest.approx(found[0]["samples_per_second"], rel=0.1)
    for wrong in (["--gpus", "1"], ["--gpus", "4", "--staleness", "0.5"]):
        with pytest.raises(SystemExit):
            plan([*KEYS, *wrong])
