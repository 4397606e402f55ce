"""The command `plan`: targets, what it prints and draws, what it refuses."""

import io
import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from areal_like.config import run_config as configs
from areal_like.weights.codec import Encoder
from areal_like.weights.layout import Layout
from areal_like.weights.planes import pack
from scripts import plan
from scripts.bench.delta import changed, weights
from scripts.plan import Planning, choices, main, parse
from scripts.simulation import costs, plan_report
from scripts.simulation.closed_form import Prediction, predict
from scripts.simulation.plan_picture import by_bound, by_split
from scripts.simulation.planning import Choice, Plan, Planner
from scripts.simulation.run import Outcome, Simulation
from scripts.simulation.targets import Target, target
from scripts.simulation.traffic import amount_of, delta_bytes, traffic

BASE = "configs/bench/modes.yaml"
QUICK = [BASE, "groups_per_batch=4", "--staleness", "1", "--steps", "4", "--weight-intervals", "1", "--best", "2"]


def made(choice: Choice, rate: float, ages: dict[int, int] | None = None, tokens: int = 1000) -> Plan:
    outcome = Outcome(1.0, rate, 0.5, 0.25, ages or {0: 10}, tokens, {}, 0, 0)
    return Plan(choice, Prediction(1.0, 2.0, 3.0, 0.5, 1.0), outcome, 4, 0)


# The target


def test_a_target_says_which_plan_is_the_best() -> None:
    large, small = made(Choice(4, 4, 1.0), 80.0), made(Choice(1, 1, 1.0), 30.0)
    wordy = made(Choice(2, 6, None), 70.0, tokens=5000)
    assert Target().best_first([small, wordy, large])[0] is large
    assert Target("tokens_per_second").best_first([small, large, wordy])[0] is wordy
    assert Target("cost").best_first([large, small, wordy])[0] is small
    assert Target("samples_per_second", 25.0).best_first([large, small])[0] is small, "the fewest GPUs that come to it"
    assert Target("samples_per_second", 50.0).best_first([large, small, wordy])[0] is large
    assert Target("samples_per_second", 99.0).best_first([small, large])[0] is large, "none does: the nearest"


def test_only_some_targets_leave_gpus_unused() -> None:
    assert Target().totals(64, 1) == [64] and Target("cost").totals(64, 1) == [8, 16, 24, 32, 40, 48, 56, 64]
    assert Target("samples_per_second", 5.0).totals(8, 4) == [5, 6, 7, 8]
    assert str(target("samples_per_second=500")) == "samples_per_second=500" and str(target("cost")) == "cost"


def test_the_fewest_gpus_that_come_to_a_rate_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A GPU pair makes 32 samples in .4 s at most here, and 8 GPUs about four times as many."""
    file = tmp_path / "plan.json"
    assert main([*QUICK, "--gpus", "8", "--target", "samples_per_second=60", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found[0]["gpus"] == 2 and found[0]["samples_per_second"] >= 60 and "NOT" not in capsys.readouterr().out
    assert main([*QUICK, "--gpus", "2", "--target", "samples_per_second=90000"]) == 0
    assert "NOT reached: samples_per_second=90000 with at most 2 GPUs" in capsys.readouterr().out


def test_a_small_mean_staleness_keeps_sync_among_the_candidates(tmp_path: Path) -> None:
    """Sync is half as fast here, so that the closed form would rule it out beside async."""
    file = tmp_path / "plan.json"
    assert main([BASE, "learner.base=0.4", *QUICK[1:], "--gpus", "2", "--json", str(file), "--most-stale", "0"]) == 0
    assert all(each["mode"].startswith("sync") for each in json.loads(file.read_text()))


# What is printed


def test_the_table_is_whole_in_80_columns() -> None:
    long = Choice(52, 12, 4.0, slots=128, interval=2, group_size=16, groups=8)
    plans = [made(long, 12345.0, {0: 1, 4: 9}), made(replace(long, bound=None, tail=True, stream=True), 9.0)]
    screen = Console(width=80, record=True, file=io.StringIO())
    screen.print(plan_report.rows("the best", plans))
    said = screen.export_text()
    words = " ".join(word for line in said.splitlines() for word in line.split("│")[3:4]).split()
    assert "…" not in said and max(map(len, said.splitlines())) <= 80
    assert " ".join(words) == f"{plans[0].choice.mode} {plans[1].choice.mode}"
    assert all(cell in said for cell in ("52 + 12", "12,345", "3.60", "50%, 25%"))


def test_figures_have_the_whole_distribution_of_staleness() -> None:
    one = made(Choice(2, 2, 4.0), 10.0, {0: 10, 1: 50, 3: 40})
    found = plan_report.figures(one, configs.load([BASE]), None, None)
    assert found["staleness_shares"] == {"0": 0.1, "1": 0.5, "3": 0.4}
    assert [found[f"staleness_{name}"] for name in ("p50", "p95", "max")] == [1, 3, 3]
    assert list(plan_report.shares({0: 0.1, 1: 0.5, 3: 0.4})) == ["0: 10%", "1: 50%", "3: 40%"]
    many = list(plan_report.shares({age: 0.05 for age in range(20)}))
    assert len(many) == plan_report.MOST_AGES and many[-1] == "more: 60%"


def test_bytes_of_weights_are_those_of_the_model(capsys: pytest.CaptureFixture) -> None:
    config = configs.load(["quickstart"])
    whole = traffic(configs.load(["quickstart", "weights.coding=full"]), 0.01)
    unknown, deltas = traffic(config, None), traffic(config, 0.01)
    assert whole and unknown and deltas and whole.sent == unknown.sent and "at most" in unknown.note
    from scripts.starting.estimate import estimate

    assert whole.sent == estimate(config)["model"]["weight update, per actor"]
    assert deltas.sent == pytest.approx(whole.sent / 2 * delta_bytes(0.01, 2))
    figures = whole.figures(8, 4)
    assert figures["weight_bytes_per_version"] == 8 * whole.sent
    assert figures["weight_bytes_per_step"] == 2 * whole.sent
    assert traffic(configs.load([BASE]), None) is None, "a timed learner has no model"
    assert main([*QUICK, "--gpus", "2"]) == 0 and "bytes of weights: not known" in capsys.readouterr().out
    assert [amount_of(count) for count in (12, 15.2e9, 3.5e12)] == ["12 B", "15.2 GB", "3.5 TB"]


def test_updates_are_as_large_as_the_deltas_that_are_told_of(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.yaml"
    lengths.write_text("answers: {median: 20, most: 200, prompt: 20}\n")
    words = ["quickstart", "groups_per_batch=1", "--gpus", "2", "--hardware", "H100", "--costs", str(lengths)]
    words += ["--staleness", "1", "--weight-intervals", "1", "--steps", "1", "--best", "1"]
    whole, deltas = (Planning(parse([*words, *more])) for more in ([], ["--density", "0.01"]))
    assert deltas.traffic and whole.traffic and deltas.cost.weights.size == deltas.traffic.sent < whole.traffic.sent / 9
    assert whole.cost.weights.size == pytest.approx(whole.traffic.sent)


@pytest.mark.parametrize("density", [0.003, 0.03, 0.15, 0.9])
def test_the_bytes_of_a_delta_are_near_those_of_the_codec(density: float) -> None:
    rng = np.random.default_rng(0)
    before = weights(4, rng)
    after, layout = changed(before, density, rng), Layout(before.specs, 4 << 20)
    encoder = Encoder(layout)
    size = sum(len(pack(encoder.encode(block, before.buffer, after.buffer))) for block in layout.blocks)
    expected = delta_bytes(density, 2) * before.buffer.size / 2
    assert expected == pytest.approx(size, rel=0.2)
    assert delta_bytes(1.0, 2) <= 2


# The picture


def test_the_picture_shows_throughput_by_split_and_staleness_by_bound(tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    assert main([*QUICK, "--gpus", "4", "--staleness", "1", "2", "--plot", str(file)]) == 0
    assert file.stat().st_size > 10_000


def test_the_panels_have_the_closed_form_beside_the_simulation() -> None:
    both = Choice(2, 6, 1.0, each=2), Choice(1, 8, 1.0, each=2)
    best, other = (made(choice, 10.0 * choice.actors, {0: 5, 1: 5}) for choice in both)
    searched, elsewhere = made(replace(both[0], slots=4), 99.0), made(Choice(1, 1, 1.0), 1.0)
    form = {choice: best.predicted for choice in (*both, elsewhere.choice)}
    panel = by_split(best, [best, other, searched, elsewhere], form)
    assert panel.lines == {"async, η = 1": {4.0: 20.0, 2.0: 10.0}} and panel.marked == (4.0, 20.0)
    assert panel.formulas == {"async, η = 1": {4.0: 3.0, 2.0: 3.0}}
    panel = by_bound([made(Choice(2, 6, bound), 1.0, {1: 1, 3: 3}) for bound in (math.inf, 1.0, 4.0)])
    assert panel.names == {0.0: "1", 1.0: "4", 2.0: "∞"} and panel.lines["mean"] == {0.0: 2.5, 1.0: 2.5, 2.0: 2.5}
    assert panel.lines["p95"][0.0] == 3.0 and panel.formulas == {"mean, closed form": {0.0: 0.5, 1.0: 0.5, 2.0: 0.5}}


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_the_closed_form_knows_how_often_weights_come(interval: int) -> None:
    """docs/simulation.md: A · n / (k · S) + 1 / 2k versions where rollout is the bottleneck."""
    words = ["actors.count=4", "scheduler.max_staleness=8", "learner.base=0.01", "run.steps=48", "engine.sigma=0.3"]
    config = configs.load([BASE, f"weight_sync_interval={interval}", *words])
    cost = costs.of_timed(config)
    found = predict(cost, 4, 128, 8, sync=False, prompt=8, most=4000, interval=interval)
    simulated = Simulation(config, cost).run()
    assert found.staleness == pytest.approx((4 * 64 / 128 + 0.5) / interval)
    assert simulated.staleness_mean == pytest.approx(found.staleness, abs=0.5)
    assert simulated.samples_per_second == pytest.approx(found.throughput, rel=0.1)


# What is refused


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--efficiency 0", "above 0, 1 at most"),
        ("--efficiency -1", "above 0, 1 at most"),
        ("--efficiency nan", "above 0, 1 at most"),
        ("--off-by -2", "at least 1"),
        ("--off-by 0.5", "at least 1"),
        ("--off-by nan", "at least 1"),
        ("--price -2", "at least 0"),
        ("--price inf", "at least 0"),
        ("--staleness 0.5", "a whole number of at least 0, or inf"),
        ("--staleness 1 -1", "a whole number of at least 0, or inf"),
        ("--staleness nan", "a whole number of at least 0, or inf"),
        ("--most-stale nan", "at least 0, or inf"),
        ("--most-stale -1", "at least 0, or inf"),
        ("--density 0", "above 0, 1 at most"),
        ("--target speed", "samples_per_second, tokens_per_second, cost"),
        ("--target cost=3", "a rate above 0"),
        ("--target samples_per_second=nan", "a rate above 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(words: str, reason: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main([BASE, "--gpus", "4", *words.split()])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and reason in said and f"argument {words.split()[0]}" in said


def test_a_verifier_that_overruns_is_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    slow = tmp_path / "slow.yaml"
    slow.write_text("verifier: {median: 1000, sigma: 0.1}\n")
    with pytest.raises(SystemExit) as ended:
        main([*QUICK, "--gpus", "2", "--costs", str(slow)])
    said = capsys.readouterr()
    assert ended.value.code == 2 and "no candidate could be simulated" in said.err
    assert "overran rewards.timeout" in said.err and "left out" in said.out


def test_the_model_that_fits_on_no_learner_is_refused() -> None:
    config = configs.load([BASE])
    cost = costs.of_timed(config)
    cost.learner.least = 9
    planner = Planner(lambda words: configs.load([BASE, *words]), cost, 1.0)
    with pytest.raises(configs.ConfigError, match="at least 9 GPUs"):
        planner.grid(choices(4, 1, [1]))


def test_ctrl_c_ends_the_command_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "Planning", interrupted)
    assert main([BASE, "--gpus", "2"]) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_a_signal_ends_the_process_without_a_traceback() -> None:
    command = [sys.executable, "-m", "scripts.plan", BASE, "--gpus", "8"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and "candidates" in process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and said.startswith("ended by SIGINT") and said.count("\n") == 1
