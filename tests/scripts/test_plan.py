"""Plans of a cluster: the closed form, candidates, the recommended config."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from areal_like.config import run_config as configs
from scripts.plan import choices, main
from scripts.simulation import costs, roofline
from scripts.simulation.closed_form import predict
from scripts.simulation.costs import scaled
from scripts.simulation.plan_report import ranges
from scripts.simulation.planning import Choice, Knobs, Planner, corners, slower, splits
from scripts.simulation.run import Simulation
from scripts.starting.memory import Sizes

BASE = "configs/bench/modes.yaml"


@pytest.mark.parametrize("base", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("bound", [None, 1.0, 4.0])
def test_the_closed_form_agrees_with_the_simulation_where_lengths_are_equal(base: float, bound: float | None) -> None:
    mode = ["mode=sync"] if bound is None else [f"scheduler.max_staleness={bound:g}"]
    config = configs.load([BASE, f"learner.base={base}", *mode])
    cost = costs.of_timed(config)
    cost.sample, cost.learner, cost.weights.encode = costs.Sample(), costs.LearnerCost(base), 0.001
    found = predict(cost, 2, 128, bound or 0.0, sync=bound is None, prompt=8, most=4000)
    simulated = Simulation(config, cost).run()
    assert found.throughput == pytest.approx(simulated.samples_per_second, rel=0.05)
    assert found.rollout == pytest.approx(128 / 0.2, rel=0.01) and found.training == pytest.approx(128 / base)


def test_where_rollout_holds_up_the_age_is_what_is_in_flight() -> None:
    """Little's law: 4 actors of 64 slots and batches of 128 samples are 2 versions, and half a batch of waiting."""
    words = ["actors.count=4", "scheduler.max_staleness=8", "learner.base=0.01", "run.steps=40", "engine.sigma=0.3"]
    config = configs.load([BASE, *words])
    cost = costs.of_timed(config)
    found, simulated = predict(cost, 4, 128, 8, sync=False, prompt=8, most=4000), Simulation(config, cost).run()
    assert found.staleness == pytest.approx(2.5) and found.throughput == pytest.approx(found.rollout, rel=0.02)
    assert simulated.staleness_mean == pytest.approx(found.staleness, abs=0.5)
    assert simulated.samples_per_second == pytest.approx(found.throughput, rel=0.1)


def test_splits_leave_a_gpu_for_the_learner() -> None:
    assert splits(8, 1) == [1, 2, 3, 4, 5, 6, 7] and splits(8, 4) == [1] and max(splits(64, 1)) == 60
    with pytest.raises(configs.ConfigError, match="too few"):
        splits(4, 4)


def test_a_learner_on_more_gpus_is_faster_but_not_in_proportion() -> None:
    cost = costs.Costs(learner=costs.LearnerCost(base=1.0, per_token=1e-3))
    assert scaled(cost, 4, 1.0).learner.base == 0.25
    assert scaled(cost, 4, 0.9).learner.per_token == pytest.approx(1e-3 / (4 * 0.81)) and cost.learner.base == 1.0


def test_candidates_name_their_settings() -> None:
    found = choices(8, 2, [1, math.inf])
    assert {each.learner for each in found} == {2, 4, 6} and len(found) == 3 * 4
    assert Choice(3, 2, math.inf).overrides() == ["actors.count=3", "mode=async", "scheduler.max_staleness=inf"]
    assert "scheduler.oversample_prompts=1.25" in Choice(3, 2, None, tail=True).overrides()


def planner_of(*words: str) -> Planner:
    def load(overrides: Sequence[str]) -> configs.Config:
        return configs.load([BASE, "run.steps=4", "groups_per_batch=4", "sizing.group_size=4", *words, *overrides])

    return Planner(load, costs.of_timed(load([])), 0.95)


def test_the_search_finds_the_knob_that_holds_the_run_up() -> None:
    """Slots are few and each step costs as much for many sequences: twice as many are nearly twice as fast."""
    planner = planner_of("engine.slots=8", "learner.base=0.01")
    (start,) = planner.grid([Choice(2, 2, 4.0)])
    found = planner.search(start, Knobs(intervals=[1]), lambda _: True)
    best = max(found, key=lambda each: each.rate)
    assert best.rate > 1.8 * start.rate and (best.choice.slots or 0) >= 16
    assert f"{best.choice.slots} slots" in best.choice.mode
    assert len({each.choice for each in found} | {start.choice}) == len(found) + 1, "none is simulated twice"


def test_the_search_keeps_to_what_is_allowed() -> None:
    planner = planner_of("engine.slots=8", "learner.base=0.01")
    (start,) = planner.grid([Choice(2, 2, 4.0)])
    found = planner.search(start, Knobs(intervals=[1]), lambda made: made.choice.slots is None)
    assert {each.choice.slots for each in found} <= {None, 4, 16}, "16 slots are faster, and nothing starts from there"


def test_what_the_search_tries_differs_in_one_knob_and_group_sizes_keep_the_batch() -> None:
    config, cost = configs.load([BASE, "mode=sync"]), costs.of_timed(configs.load([BASE]))
    samples = config.groups_per_batch * config.sizing["group_size"]
    start = Choice(2, 2, None)
    found = Knobs(group_sizes=[config.sizing["group_size"], 16, 7]).around(start, config, cost)
    assert {each.group_size for each in found} == {None, 16}, "7 makes no whole groups, and the config's size is known"
    assert all(each.groups * each.group_size == samples for each in found if each.group_size)
    assert {each.interval for each in found} == {None} and any(each.stream for each in found)
    assert {each.slots for each in found} == {None, cost.engine.slots // 2, 2 * cost.engine.slots}
    assert {(each.actors, each.learner) for each in found} == {(1, 3), (2, 2), (3, 1)}
    for each in found:
        changed = set(each.overrides()) ^ set(start.overrides())
        assert 1 <= len(changed) <= 2, "one knob, or two words of it"
    found = Knobs().around(Choice(2, 2, 2.0), config, cost)
    assert not any(each.tail or each.stream for each in found)
    assert {(each.bound, each.interval) for each in found} == {(2.0, None), (1.0, 2)}, "as many train steps behind"


def test_a_choice_that_makes_no_config_is_left_out_and_told() -> None:
    told: list[str] = []
    planner = planner_of()
    planner._tell = told.append
    assert planner.tried([Choice(0, 2, 1.0)]) == [] and "left out" in told[0]
    assert list(planner.left_out.values()) == told


def test_the_command_recommends_a_config_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, file = tmp_path / "planned.yaml", tmp_path / "plan.json"
    words = [BASE, "groups_per_batch=4", "--gpus", "4", "--staleness", "1", "--steps", "4"]
    words += ["--price", "2", "--weight-intervals", "1"]
    words += ["--out", str(out), "--json", str(file), "--off-by", "1.01", "engine.sigma=0.5", "learner.base=0.6"]
    assert main(words) == 0
    said, found = capsys.readouterr().out, json.loads(file.read_text())
    assert "what holds it up" in said and "GPU-hours" in said
    rates = [each["samples_per_second"] for each in found]
    assert rates == sorted(rates, reverse=True) and found[0]["cost_per_million_samples"] > 0
    low, high = found[0]["ranges"]["samples_per_second"]  # over as many steps, after the same warm-up
    assert 0.9 * rates[0] < low <= rates[0] <= high < 1.1 * rates[0]
    assert found[0]["actors"] + found[0]["learner_gpus"] == 4 and found[0]["mode"].startswith("async")
    config = configs.load([str(out)])
    assert config.actors.count == found[0]["actors"] and config.engine["sigma"] == 0.5


def test_settings_that_are_equal_are_one_plan() -> None:
    """What a choice sets to the config's own value, it does not set; so nothing is simulated or shown twice."""
    planner = planner_of("engine.slots=8", "learner.base=0.01")
    config, cost = planner._base, planner._costs
    own = Choice(2, 2, 4.0)
    size, groups = config.sizing["group_size"], config.groups_per_batch
    for same in (
        replace(own, interval=1),
        replace(own, slots=8),
        replace(own, group_size=size, groups=groups),
        replace(own, interval=1, slots=8),
    ):
        assert same != own and same.settled(config, cost) == own
    assert replace(own, slots=16).settled(config, cost).slots == 16
    grid = planner.grid([own, replace(own, interval=1), Choice(1, 3, 4.0)])
    found = grid + planner.search(grid[0], Knobs(intervals=[1, 2]), lambda _: True)
    resolved = {configs.to_yaml(planner._loaded(tuple(made.choice.overrides()))) + made.choice.split for made in found}
    assert len({made.choice for made in found}) == len(found) == len(planner.made)
    assert len({(made.choice.split, made.choice.mode) for made in found}) == len(found) == len(resolved)


SEVEN_B = Sizes(28, 3584, 18944, 3584, 512, 152064, 7_600_000_000, 233_000_000)


def test_a_roofline_is_the_models_bytes_and_flops_over_the_peaks() -> None:
    known = costs.Costs(answers=costs.Answers(median=77), source="a short run")
    found = roofline.on("H100", SEVEN_B, 1, known)
    assert found.engine.base - roofline.STEP_SECONDS == pytest.approx(15.2e9 / (0.6 * 3.35e12))
    assert found.engine.per_token == pytest.approx(2 * 28 * 512 * 2 / (0.6 * 3.35e12))
    assert found.learner.per_token == pytest.approx(8 * 7.6e9 / (0.35 * 989e12)) and found.learner.least == 2
    assert found.answers.median == 77 and "not measured" in found.source and "a short run" in found.source
    newer, double = roofline.on("B200", SEVEN_B, 1, known), roofline.on("H100", SEVEN_B, 2, known)
    assert newer.engine.base < found.engine.base / 2 + roofline.STEP_SECONDS
    assert double.engine.per_sequence == pytest.approx(found.engine.per_sequence / 1.8)
    with pytest.raises(configs.ConfigError, match="--gpus-per-actor 2"):
        roofline.on("H100", replace(SEVEN_B, count=40_000_000_000), 1, known)


def test_costs_that_are_off_move_the_figures(capsys) -> None:
    config = configs.load([BASE, "run.steps=6"])
    cost = costs.of_timed(config)
    cost.sample, cost.learner, cost.weights.encode = costs.Sample(), costs.LearnerCost(0.2), 0.001
    outcomes = corners(config, cost, 2.0)
    assert slower(cost, 3.0, 1.0).engine.base == pytest.approx(0.003)
    low, high = ranges(outcomes)["samples_per_second"]
    assert low == pytest.approx(128 / 0.4, rel=0.05) and high == pytest.approx(4 * low, rel=0.1)


def test_the_recommended_config_is_simulated_to_what_was_planned(tmp_path: Path) -> None:
    """The learner's GPUs are its ranks; batches come in bursts of as many as the bound lets be ahead."""
    lengths, planned, said = tmp_path / "lengths.yaml", tmp_path / "planned.yaml", tmp_path / "plan.json"
    lengths.write_text("answers: {median: 200, sigma: 0.6, noise: 0.3, most: 2000, prompt: 20}\n")
    hardware = ["--hardware", "H100", "--costs", str(lengths)]
    words = ["quickstart", "groups_per_batch=4", "sizing.group_size=4", "--gpus", "4", *hardware]
    words += ["--staleness", "8", "--best", "1", "--weight-intervals", "1", "--out", str(planned), "--json", str(said)]
    assert main(words) == 0
    best, config = json.loads(said.read_text())[0], configs.load([str(planned), "run.steps=150", "eval.prompts=0"])
    assert config.learner.ranks == best["learner_gpus"]
    found = Simulation(config, roofline.known(config, lengths, "H100")).run(50)
    assert found.samples_per_second == pytest.approx(best["samples_per_second"], rel=0.05)
