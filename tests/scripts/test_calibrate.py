"""Costs of a simulation, fitted to what a run measured."""

import json
from pathlib import Path

import numpy as np
import pytest

from actors.engines import step_costs
from actors.engines.decode_clock import DecodeCost
from actors.engines.step_costs import StepCosts
from areal_like.config import run_config as configs
from areal_like.config.registry import build
from areal_like.machine import cores
from areal_like.run.run_folder import write_costs
from areal_like.run.spans import Spans
from scripts.calibrate import main
from scripts.simulation.calibration import _alone, calibrate, nonnegative
from scripts.simulation.costs import read


def test_step_costs_count_what_belongs_to_a_step() -> None:
    counted = StepCosts()
    counted.begin(1.0, 3, 30)
    counted.begin(1.5, 4, 40)  # the next one begins: the first took .5
    counted.skip(0.2)  # an update
    counted.end(2.5)
    counted.end(9.0)  # idle time belongs to none
    assert counted.decode[2][0].tolist() == [2, 7, 70, pytest.approx(1.3)] and len(counted.decode) == 1


def test_counts_of_actors_add_up(tmp_path: Path) -> None:
    for number in range(2):
        counted = StepCosts()
        counted.begin(0.0, 1, 10)
        counted.end(1.0 + number)
        counted.prefilled(100, 0.5)
        counted.recomputed(50, 0.25)
        counted.begun = 4
        for _ in range(200):
            counted.answered([7, 8])
        counted.write(tmp_path, f"actor-{number}", 10)
    found = step_costs.read(tmp_path)
    assert found.decode[0][0].tolist() == [2.0, 2.0, 20.0, 3.0] and found.decode[0][3, 3] == 5.0
    assert found.prefill == [200.0, 1.0] and found.again == [100.0, 0.5]
    assert list(found.lengths) == 400 * [[7, 8]] and found.begun == 8


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"decode": {"0": [[1]]}}'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "costs").mkdir()
    (tmp_path / "costs" / "actor-0.json").write_text(text)
    with pytest.raises(ValueError, match=r"costs/actor-0\.json: not what an actor or the buffer writes"):
        step_costs.read(tmp_path)


def test_a_fit_without_negative_costs() -> None:
    columns = np.stack([np.ones(6), np.arange(6.0)], 1)
    for values, fit in ((2.0 + 3.0 * np.arange(6), [2.0, 3.0]), (9.0 - np.arange(6), [6.5, 0.0])):
        assert nonnegative(columns.T @ columns, columns.T @ values) == pytest.approx(fit)


def write_run(run: Path, cost: DecodeCost) -> None:
    """A run folder as far as calibration reads it, of an engine of that cost."""
    counted, now = StepCosts(), 0.0
    for sequences in (1, 2, 4, 8, 16, 32):
        for tokens in (10 * sequences, 50 * sequences):
            counted.begin(now, sequences, tokens)
            now += cost.steps(1, sequences, tokens)
            counted.end(now)
    counted.prefilled(1000, 1000 * cost.prefill)
    counted.begun = 1000
    counted.busy = now / 2
    counted.worked(-3.0)  # as if this thread had worked for three seconds more, elsewhere
    counted.write(run, "actor-0", 1000)
    write_costs(run, "buffer", {"buffer": (500, 0.25)})
    configs.save(configs.load(["quickstart"]), run / "config.yaml")
    rows = [
        {
            "step": step,
            "tokens": 1000 + 100 * (step % 3),
            "train/step_seconds": 0.5 + 1e-4 * (1000 + 100 * (step % 3)),
            "publish/seconds": 0.01,
            "train/idle_share": 0.2,
            "train/tokens_per_second": 1000.0,
            "publish/encode_seconds": 0.02,
            "rollout/update_fetch_seconds": 0.03,
            "rollout/update_replica_seconds": 0.01,
            "rollout/update_pause_seconds": 0.004,
            "reward/mean": 0.25,
            "response_length/p50": 50.0,
            "response_length/p95": 150.0,
            "response_length/max": 400,
        }
        for step in range(1, 13)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_what_a_learner_does_beside_its_steps_needs_the_metrics_that_tell(tmp_path: Path) -> None:
    write_run(tmp_path, DecodeCost(base=0.01))
    rows = [{name: value for name, value in row.items() if "tokens_per" not in name} for row in rows_of(tmp_path)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert calibrate(tmp_path).costs.learner.after == 0.0


def test_costs_come_back(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    cost = DecodeCost(base=0.01, per_sequence=0.001, per_token=1e-5, prefill=1e-4)
    write_run(tmp_path, cost)
    found = calibrate(tmp_path)
    engine, learner, weights = found.costs.engine, found.costs.learner, found.costs.weights
    assert [engine.base, engine.per_sequence, engine.per_token] == pytest.approx([0.01, 0.001, 1e-5], rel=1e-6)
    assert engine.prefill == pytest.approx(1e-4) and engine.apply == 0.004 and 0 < engine.busy < 1
    assert [learner.base, learner.per_token, learner.publish] == pytest.approx([0.5, 1e-4, 0.01], rel=0.01)
    assert learner.cores == 1, "of one rank with one thread"
    busy = [0.8 * row["tokens"] / 1000 for row in rows_of(tmp_path)[3:]]  # of each step but the first that counts
    named = [row["train/step_seconds"] + row["publish/seconds"] for row in rows_of(tmp_path)[3:]]
    assert learner.after == pytest.approx(np.mean(busy) - np.mean(named)) and learner.after > 0.1
    assert (weights.encode, weights.fetch) == pytest.approx((0.02, 0.04))
    sample = found.costs.sample
    assert (sample.actor, sample.buffer) == pytest.approx((0.003, 0.0005), rel=0.2) and sample.cores == cores()
    assert found.costs.buffer == 0.0
    assert found.costs.answers.median == 50 and found.costs.answers.right == 0.25
    assert found.residuals["train step"] < 1e-6 and any("kept samples" in note for note in found.notes)
    assert main([str(tmp_path), "--out", str(tmp_path / "costs.yaml")]) == 0
    assert "the fit is off by" in capsys.readouterr().out
    assert read(tmp_path / "costs.yaml") == found.costs


def test_tokens_that_are_computed_when_a_sequence_joins(tmp_path: Path) -> None:
    """Equal prompts share their computation; the cache of running sequences tells what a token costs."""
    cost = DecodeCost(base=0.01, prefill=1e-4, fresh=0.125)
    write_run(tmp_path, cost)
    path = tmp_path / "costs" / "actor-0.json"
    said = json.loads(path.read_text())
    samples, prompt = 1000, len(build("task", configs.load(["quickstart"]).task, 0).prompt("train", 0).tokens)
    said["prefill"], said["again"] = [samples * prompt / 8, samples * cost.join(prompt)], [5000, 5000 * cost.prefill]
    path.write_text(json.dumps(said))
    engine = calibrate(tmp_path).costs.engine
    assert (engine.prefill, engine.fresh) == pytest.approx((1e-4, 0.125))
    said["again"][1] *= 2  # twice as expensive as those that join
    path.write_text(json.dumps(said))
    engine = calibrate(tmp_path).costs.engine
    assert engine.prefill == pytest.approx(2e-4) and engine.cost.join(prompt) == pytest.approx(cost.join(prompt))


def test_steps_of_one_size_do_not_tell_what_others_cost(tmp_path: Path) -> None:
    write_run(tmp_path, DecodeCost(base=0.01))
    assert not any("a guess" in note for note in calibrate(tmp_path).notes)
    path = tmp_path / "costs" / "actor-0.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"decode": {"5": said["decode"]["5"]}}))
    assert any("about 32 sequences" in note for note in calibrate(tmp_path).notes)


def test_steps_measured_at_the_runs_end_tell_what_its_own_do_not(tmp_path: Path) -> None:
    """The run had steps of 32 sequences, each half as slow again as alone; the others were measured alone."""
    cost = DecodeCost(base=0.01, per_sequence=0.001, per_token=1e-5)
    write_run(tmp_path, cost)
    path = tmp_path / "costs" / "actor-0.json"
    said = json.loads(path.read_text())
    run = np.array(said["decode"]["5"])
    run[3], run[:, 3] = 1.5 * run[3], 1.5 * run[:, 3]
    path.write_text(json.dumps(said | {"decode": {"5": run.tolist()}, "alone": said["decode"]}))
    found = calibrate(tmp_path)
    engine = found.costs.engine
    assert [engine.base, engine.per_sequence, engine.per_token] == pytest.approx([0.015, 0.0015, 1.5e-5], rel=1e-6)
    assert not any("a guess" in note for note in found.notes)


def write_blocks(run: Path, cost: DecodeCost, beside: float, count: int = 100) -> None:
    """A learner that trains every other second, and as many blocks of steps in each."""
    path, spans = run / "costs" / "actor-0.json", Spans(run, "learner", since_1970=0.0)
    said, blocks = json.loads(path.read_text()), []
    for second in range(10):
        trains = second % 2 == 0
        if trains:
            spans.add("train", second + 0.005, second + 1.005)
        for place in range(count // 10):
            begin = second + 0.01 + 0.09 * place
            seconds = (beside if trains else 1.0) * cost.steps(1, 8, 80)
            blocks.append([begin, begin + seconds, 1, 8, 80, seconds])
    path.write_text(json.dumps(said | {"blocks": blocks}))


def test_steps_beside_a_learner_that_trains(tmp_path: Path) -> None:
    """The fit is of all steps, half of them beside it: the costs are those of the others."""
    cost = DecodeCost(base=0.01, per_sequence=0.001, per_token=1e-5, prefill=1e-4)
    write_run(tmp_path, cost)
    write_blocks(tmp_path, cost, 1.5)
    engine = calibrate(tmp_path).costs.engine
    assert engine.beside == pytest.approx(1.5)
    alone = [engine.base, engine.per_sequence, engine.per_token, engine.prefill]
    assert alone == pytest.approx([value / 1.25 for value in (0.01, 0.001, 1e-5, 1e-4)], rel=1e-6)


def test_steps_on_another_machine_are_not_beside_the_learner(tmp_path: Path) -> None:
    cost = DecodeCost(base=0.01)
    write_run(tmp_path, cost)
    write_blocks(tmp_path, cost, 1.5)
    path = tmp_path / "costs" / "actor-0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cores": {"one": 2, "other": 2}}))
    engine = calibrate(tmp_path).costs.engine
    assert (engine.base, engine.beside) == pytest.approx((0.01, 1.0))


def test_steps_that_were_measured_weigh_as_much_as_the_runs_own(tmp_path: Path) -> None:
    """No costs fit both, so the weights decide: relative errors, the run's by their seconds, the others' equally."""
    counted = StepCosts()
    for classes, points in ((counted.decode, [(32, 400, 0.06)] * 70), (counted.alone, MEASURED * 3)):
        for sequences, tokens, seconds in points:
            values = np.array([1.0, sequences, tokens, seconds])
            size = step_costs.class_of(sequences)
            classes[size] = classes.get(size, np.zeros((4, 4))) + values[:, None] * values
    scaled = [(n, tokens, 1.5 * seconds) for n, tokens, seconds in MEASURED]
    weights = [70 * 0.06 / len(MEASURED) / seconds**2 for _, _, seconds in scaled]
    expected = sum(w * np.outer(row, row) for w, row in zip(weights, ((1.0, *point) for point in scaled), strict=True))
    assert _alone(counted) == pytest.approx(expected)


MEASURED = [(1, 10, 0.01), (4, 80, 0.03), (32, 400, 0.04)]


@pytest.mark.parametrize(("beside", "count"), [(0.8, 100), (1.5, 20)])
def test_faster_steps_and_few_of_them_say_nothing_of_a_learner_beside(
    tmp_path: Path, beside: float, count: int
) -> None:
    cost = DecodeCost(base=0.01)
    write_run(tmp_path, cost)
    write_blocks(tmp_path, cost, beside, count)
    engine = calibrate(tmp_path).costs.engine
    assert (engine.base, engine.beside) == pytest.approx((0.01, 1.0))


def test_lengths_are_those_that_actors_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_run(tmp_path, DecodeCost(base=0.01))
    path = tmp_path / "costs" / "actor-0.json"
    said = json.loads(path.read_text())
    lengths = [[10 * n, 10 * n + 1] for n in range(1, 10)]
    path.write_text(json.dumps(said | {"lengths": lengths}))
    found = calibrate(tmp_path)
    assert found.costs.answers.trace == lengths and found.costs.answers.median == 50.5 and not found.notes
    assert main([str(tmp_path), "--out", str(tmp_path / "costs.yaml")]) == 0
    assert "trace: lengths of 9 groups" in capsys.readouterr().out  # in the file they stand
    assert read(tmp_path / "costs.yaml") == found.costs
    assert calibrate(tmp_path, 11).costs.answers.trace is None  # whose lengths were counted in more steps


def test_caches_without_prompts_and_tasks_of_few_rows(tmp_path: Path) -> None:
    """Prompts of one token are never computed; some tasks have fewer rows than are asked for the length of a prompt."""
    write_run(tmp_path, DecodeCost(base=0.01))
    path = tmp_path / "costs" / "actor-0.json"
    said = json.loads(path.read_text())
    for prefill, again, found in (([0, 0.0], [100, 0.5], (0.005, 0.0)), ([0, 0.0], [0, 0.5], (0.0, 1.0))):
        path.write_text(json.dumps(said | {"prefill": prefill, "again": again}))
        engine = calibrate(tmp_path).costs.engine
        assert (engine.prefill, engine.fresh) == pytest.approx(found)
    path.write_text(json.dumps(said | {"prefill": [100, 0.5]}))
    configs.save(configs.load(["quickstart", "task.train_size=3"]), tmp_path / "config.yaml")
    assert calibrate(tmp_path).costs.engine.fresh > 0


def test_prefill_and_verifiers_have_their_residuals(tmp_path: Path) -> None:
    """Of 10 tokens in .1, .2 and .3 s, and of 20 in .4: .02 s per token, off by .1, 0, .1 and 0 where .25 is usual."""
    write_run(tmp_path, DecodeCost(base=0.01))
    counted = StepCosts()
    for tokens, seconds in ((10, 0.1), (10, 0.2), (10, 0.3), (20, 0.4)):
        counted.prefilled(tokens, seconds)
    path = tmp_path / "costs" / "actor-0.json"
    said = json.loads(path.read_text()) | {"prefill": counted.prefill, "prefills": counted.prefills}
    path.write_text(json.dumps(said))
    rows = [row | {"rewards/seconds_p50": 1.0 + row["step"] % 3} for row in rows_of(tmp_path)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = calibrate(tmp_path)
    assert found.residuals["prefill"] == pytest.approx((2 * 0.1**2 / 4) ** 0.5 / 0.25)
    assert found.costs.verifier.median == 2.0
    off = [(row["rewards/seconds_p50"] / 2.0 - 1.0) ** 2 for row in rows[2:]]
    assert found.residuals["verifier"] == pytest.approx(np.mean(off) ** 0.5)
    del said["prefills"]  # as actors wrote it before
    path.write_text(json.dumps(said))
    assert "prefill" not in calibrate(tmp_path).residuals


def test_scattered_train_steps_are_told_of(tmp_path: Path) -> None:
    write_run(tmp_path, DecodeCost(base=0.01))
    rows = [row | {"train/step_seconds": 1.0 + row["step"] % 2} for row in rows_of(tmp_path)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert any("train steps took" in note and "nothing else running" in note for note in calibrate(tmp_path).notes)


def test_a_simulated_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_run(tmp_path, DecodeCost(base=0.01))
    (tmp_path / "summary.json").write_text('{"simulated": true}')
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "was simulated: calibrate on a run that was made" in capsys.readouterr().err


def test_too_short_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_run(tmp_path, DecodeCost())
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--steps", "2"])
    assert "needs more than 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nothing")])
    assert "no run folder" in capsys.readouterr().err
