"""`scripts.eval` on tiny random models: every figure is computed again from the answers. Two models, prompt by prompt,
against simulation. A checkpoint as a model's folder; `scripts.serve`."""

import itertools
import json
import re
import shutil
import signal
import time
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch

from areal_like import estimates
from areal_like.config import run_config as configs
from areal_like.config.registry import build
from areal_like.errors import UserError
from areal_like.run import checkpoints
from areal_like.run.run_folder import CONFIG
from learners.build import build_trainer
from scripts import eval as evaluation
from scripts import export
from scripts.eval import model_folder, paired
from tests.folders import write_folder
from tests.forked import forked, said
from tests.scripts import graders

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder, "llama tied")
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    lines = [json.dumps({"prompt": f"What is {i} + 1?", "answer": str(i + 1)}) for i in range(7)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path / "rows.jsonl"


@pytest.mark.parametrize(("samples", "right"), [(1, 0), (1, 1), (4, 1), (5, 2), (6, 6), (6, 0)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_with_a_right_one(samples: int, right: int) -> None:
    answers = [True] * right + [False] * (samples - right)
    for k in range(1, samples + 1):
        choices = list(itertools.combinations(answers, k))
        assert estimates.pass_at_k(samples, right, k) == pytest.approx(sum(map(any, choices)) / len(choices))
    with pytest.raises(ValueError, match=f"pass@{samples + 1}"):
        estimates.pass_at_k(samples, right, samples + 1)


def test_intervals_hold_the_mean_and_shrink_with_more_prompts() -> None:
    assert estimates.powers(1) == [1] and estimates.powers(6) == [1, 2, 4, 6] and estimates.powers(8) == [1, 2, 4, 8]
    low, high = estimates.interval([1.0] * 10)
    assert low == pytest.approx(0.7225, abs=1e-3) and high == pytest.approx(1.0), "10 of 10 is not certainty (Wilson)"
    for values in ([0.0, 1.0, 0.5, 0.25] * 5, [-2.0, 3.0, 0.5, 9.0] * 5):
        mean, (low, high) = sum(values) / len(values), estimates.interval(values)
        more = estimates.interval(values * 10)
        assert low < mean < high and more[1] - more[0] < (high - low) / 2.5


def figures(*arguments: str, at: Path) -> dict:
    assert evaluation.main([*arguments, "--json", str(at / "found.json")]) == 0
    return json.loads((at / "found.json").read_text())


def test_each_figure_is_that_of_the_answers(model: Path, rows: Path, tmp_path: Path) -> None:
    spec = f"{{name: jsonl, path: {rows}, heldout_path: {rows.parent}/held.jsonl, max_tokens: 9, "
    spec += f"reward: {graders.__name__}:in_parts}}"
    held = [json.dumps({"prompt": f"{i}?", "answer": "x"}) for i in range(5)]
    (rows.parent / "held.jsonl").write_text("\n".join(held))
    asked = [str(model), spec, "--samples", "4", "--prompts", "5", "--show", "1"]
    found = figures(*asked, at=tmp_path)
    first = found[spec]
    rewards = [answer["rewards"] for answer in first["answers"]]
    assert len(rewards) == 5 and all(len(each) == 4 for each in rewards)
    assert [[graders.short("", text) for text in a["texts"]] for a in first["answers"]] == rewards
    assert first["part/short"] == first["reward"] and first["reward"][0] == pytest.approx(sum(map(sum, rewards)) / 20)
    for k in (1, 2, 4):
        chances = [
            sum(map(any, itertools.combinations(each, k))) / len(list(itertools.combinations(each, k)))
            for each in rewards
        ]
        mean, low, high = first[f"pass@{k}"]
        assert mean == pytest.approx(sum(chances) / 5) and low <= mean <= high
    assert first["truncated"] == sum(a["truncated"] for a in first["answers"]) / 20
    assert first["tokens"] == pytest.approx(sum(sum(a["lengths"]) for a in first["answers"]) / 20)
    assert len({text for a in first["answers"] for text in a["texts"]}) > 5, "samples differ"
    assert figures(*asked, at=tmp_path) == found


def test_a_file_is_asked_whole_and_greedily_and_copies_of_a_prompt_are_one(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    found = figures(str(model), str(rows), "--max-tokens", "5", at=tmp_path)[str(rows)]
    assert sorted(each["wanted"] for each in found["answers"]) == sorted(str(i + 1) for i in range(7))
    assert found["samples"] == 1 and max(each["lengths"][0] for each in found["answers"]) <= 5
    rows.write_text(f"{rows.read_text()}\n" * 3)
    thrice = figures(str(model), str(rows), "--max-tokens", "5", at=tmp_path)[str(rows)]
    assert [thrice[key] for key in ("prompts", "reward")] == [7, found["reward"]], "the interval, too"
    assert {len(each["rewards"]) for each in thrice["answers"]} == {3}


def test_a_file_is_asked_as_the_rows_of_the_run(model: Path, rows: Path, tmp_path: Path) -> None:
    final, more = shutil.copytree(model, tmp_path / "run" / "checkpoints" / "final"), tmp_path / "more.csv"
    task = f"{{name: jsonl, path: {rows}, columns: {{prompt: q}}, reward: '{graders.__name__}:short', max_tokens: 5}}"
    config = configs.load(["base", f"model={model}", f"task={task}", f"task.tokenizer={model}"])
    configs.save(config, final.parents[1] / "config.yaml")
    more.write_text("q,answer\n" + "\n".join(f"{i}?,x" for i in range(6)))
    found = figures(str(tmp_path / "run"), str(more), "--samples", "2", at=tmp_path)[str(more)]["answers"]
    assert len(found) == 6 and max(max(each["lengths"]) for each in found) <= 5
    assert [[graders.short("", text) for text in each["texts"]] for each in found] == [a["rewards"] for a in found]


def test_another_model_is_asked_the_same_and_compared(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = write_folder(tmp_path / "other", "llama tied", seed=1)
    spec = f"{{name: jsonl, path: {rows}, heldout_fraction: 0.9, max_tokens: 9, reward: {graders.__name__}:short}}"
    found = figures(str(model), spec, "--samples", "2", "--against", str(other), at=tmp_path)[spec]
    mine, others = found["answers"], found["against"]["answers"]
    assert [each["prompt"] for each in mine] == [each["prompt"] for each in others]
    assert all(a["texts"] != b["texts"] for a, b in zip(mine, others, strict=True)), "other weights"
    pairs = [(sum(b["rewards"]) / 2, sum(a["rewards"]) / 2) for a, b in zip(mine, others, strict=True)]
    change = found["differences"]["reward"]
    assert found["prompts"] == len(pairs) == 6
    assert change["difference"] == pytest.approx(sum(a - b for b, a in pairs) / 6)
    assert change["better"] == sum(a > b for b, a in pairs) and change["worse"] == sum(a < b for b, a in pairs)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(SystemExit):
        evaluation.main([str(model), spec, "--against", str(tmp_path / "nothing")])
    assert "no model there" in capsys.readouterr().err


def test_answers_without_a_reward_are_left_out_and_counted(model: Path, rows: Path, tmp_path: Path) -> None:
    held, other = tmp_path / "held.jsonl", write_folder(tmp_path / "other", "llama tied", seed=1)
    held.write_text("\n".join(json.dumps({"prompt": f"{i}?", "answer": "x" if i else "none"}) for i in range(8)))
    spec = f"{{name: jsonl, path: {rows}, heldout_path: {held}, max_tokens: 9, reward: {graders.__name__}:of_some}}"
    found = figures(str(model), spec, "--samples", "3", "--against", str(other), at=tmp_path)[spec]
    mine, others = found["answers"], found["against"]["answers"]
    assert all(len(each["rewards"]) == len(each["texts"]) == 3 - each["unscored"] for each in mine)
    assert 3 < sum(each["unscored"] for each in mine) == found["unscored"]
    means = [[np.mean(each["rewards"]) if each["rewards"] else None for each in side] for side in (mine, others)]
    pairs = [(a, b) for a, b in zip(*means, strict=True) if a is not None and b is not None]
    assert found["prompts"] == sum(a is not None for a in means[0])
    assert found["reward"][0] == pytest.approx(np.mean([a for a in means[0] if a is not None]))
    assert found["differences"]["reward"]["difference"] == pytest.approx(np.mean([a - b for a, b in pairs]))


def test_a_verifier_that_fails_is_named(model: Path, rows: Path, capsys: pytest.CaptureFixture) -> None:
    held = rows.parent / "other.jsonl"
    held.write_text(json.dumps({"prompt": "8?", "answer": "x"}))
    spec = f"{{name: jsonl, path: {rows}, heldout_path: {held}, max_tokens: 9, reward: {graders.__name__}:broken}}"
    with pytest.raises(SystemExit):
        evaluation.main([str(model), spec])
    error = capsys.readouterr().err
    assert f"{graders.__name__}:broken" in error and "no idea" in error and "Traceback" not in error


def test_a_run_is_asked_its_own_held_out_prompts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = configs.load(["quickstart", "eval.prompts=6", "sampling.max_new_tokens=3"])
    task = build("task", config.task, config.run.seed)
    final = tmp_path / "run" / "checkpoints" / "final"
    build("model", config.model, 0, task.vocab_size).save_pretrained(final)
    configs.save(config, tmp_path / "run" / "config.yaml")
    for place in (tmp_path / "run", final):
        found = figures(str(place), at=tmp_path)["copy (held-out)"]
        assert found["tokens"] == 3, "as in the run"
        assert (
            len(found["answers"]) == 6
            and found["answers"][0]["prompt"] == task.prompt("heldout", 0).messages[0]["content"]
        )
    run = str(tmp_path / "run")
    for arguments, told in (
        ([str(model)], "name a set"),
        ([str(model), "copy"], "expected the 13 of copy"),
        ([run, "--against", str(model)], "expected the 13 of copy (held-out)"),
    ):
        with pytest.raises(SystemExit):
            evaluation.main(arguments)
        assert told in capsys.readouterr().err


def test_a_difference_is_counted_by_prompt_in_both_directions() -> None:
    before, after = [0] * 9 + [1] * 2 + [1] * 5 + [0] * 4, [1] * 9 + [0] * 2 + [1] * 5 + [0] * 4
    found, back = paired(before, after), paired(after, before)
    assert [found[key] for key in ("before", "after", "better", "worse")] == [7 / 20, 14 / 20, 9, 2]
    assert found["difference"] == pytest.approx(7 / 20) and found["low"] < 7 / 20 < found["high"] and found["p"] < 0.05
    assert (back["p"], back["low"], back["high"]) == pytest.approx((found["p"], -found["high"], -found["low"]))
    assert paired([0, 1, 1, 0], [0, 1, 1, 0])["p"] == 1.0


def test_without_a_difference_one_of_twenty_is_significant_and_intervals_hold_it() -> None:
    """4 answers to each of 40 prompts by the same model, twice: answers of one prompt are alike."""
    draw, times = np.random.default_rng(0), 400
    pairs = [paired(*(draw.binomial(4, easy) / 4 for _ in range(2))) for easy in draw.random((times, 40))]
    assert 4 <= sum(each["p"] < 0.05 for each in pairs) <= 38, "5 %, within four deviations"
    assert sum(each["low"] <= 0 <= each["high"] for each in pairs) >= times - 38


SMALL = ["model.hidden_size=16", "model.intermediate_size=16", "model.num_attention_heads=2"]


def left_by(run: Path, *overrides: str) -> tuple[Path, Path]:
    """A checkpoint of changed weights, and the model that a run would leave of them."""
    config = configs.load(["quickstart", *SMALL, *overrides])
    run.mkdir()
    configs.save(config, run / CONFIG)
    trainer = build_trainer(config)
    if config.learner["name"] == "torch":
        trainer.optimizer._master += 0.01 * torch.randn(len(trainer.optimizer._master))
        trainer.optimizer._round()
    step = checkpoints.write(run, 7, trainer.save_state, {"steps": 7}, keep=2)
    trainer.save(str(run / "expected"))
    return step, run / "expected"


@pytest.mark.parametrize("more", [[], ["learner.lora={rank: 2}"]])
def test_it_has_the_weights_of_that_step(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, expected = left_by(tmp_path / "run", *more)
    folder = model_folder(step)
    assert folder == step / "model" and model_folder(step) == folder, "written once"
    assert (folder / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    assert sorted(path.name for path in step.iterdir()) == ["learner.pt", "meta.json", "model"]
    assert evaluation.main([str(step), "--prompts", "2", "--max-tokens", "2"]) == 0
    assert "copy" in capsys.readouterr().out


def test_the_best_checkpoint_is_exported_or_else_the_newest(tmp_path: Path) -> None:
    step, expected = left_by(run := tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for folder, best, reason in (("out", True, "checkpoint.best"), ("full", False, "exists")):
        with pytest.raises(configs.ConfigError, match=reason):
            export.export(run, tmp_path / folder, best)
    checkpoints.keep_best(run, [{"version": 7, "reward": 0.5}], "heldout/reward", 1)
    newest = checkpoints.write(run, 8, lambda folder: shutil.copy(step / "learner.pt", folder), {}, keep=1)
    (newest / "learner.pt").write_bytes(b"of other weights")
    export.main([str(run), "--to", str(tmp_path / "out"), "--best"])
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    (run / "checkpoints" / "best" / "learner.pt").write_bytes(b"of other weights, too")
    for best in (True, False):
        with pytest.raises(checkpoints.Damaged, match=r"learner\.pt is damaged"):
            export.export(run, tmp_path / "other", best)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "out", "run"]


def test_a_checkpoint_that_makes_no_model_is_refused(tmp_path: Path) -> None:
    step, _ = left_by(tmp_path / "run")
    with pytest.raises(configs.ConfigError, match="step-00000007"):
        model_folder(tmp_path / "run")  # its own model is not there yet
    state = (step / "learner.pt").read_bytes()
    (step / "learner.pt").write_bytes(state[: len(state) // 2])
    with pytest.raises(UserError, match="step-00000007"):
        model_folder(step)
    assert sorted(path.name for path in step.iterdir()) == ["learner.pt", "meta.json"], "nothing half is left"
    (step / "learner.pt").unlink()
    (step / "learner-0-of-2.pt").write_bytes(state)
    with pytest.raises(UserError, match=r"learner-1-of-2\.pt"):
        model_folder(step)
    (step / "learner-1-of-2.pt").write_bytes(state)  # twice as many weights as the model has
    with pytest.raises(UserError, match="ValueError"):
        model_folder(step)
    (tmp_path / "run" / CONFIG).unlink()
    with pytest.raises(configs.ConfigError, match=r"config\.yaml"):
        model_folder(step)
    with pytest.raises(configs.ConfigError, match="learner=timed"):
        model_folder(left_by(tmp_path / "timed", "learner=timed")[0])


@pytest.mark.integration
def test_a_runs_model_is_served_until_an_interrupt(tmp_path: Path) -> None:
    """A task without a tokenizer speaks its own characters."""
    config = configs.load(["quickstart"])
    build("model", config.model, 0, 13).save_pretrained(tmp_path / "run" / "checkpoints" / "final")
    configs.save(config, tmp_path / "run" / "config.yaml")
    (tmp_path / "process").mkdir()
    command = ["scripts.serve", str(tmp_path / "run"), "--port", "0"]
    with forked(command[0], [command[1:]], tmp_path / "process") as (process,):
        while not (found := re.search(r"at (http://127\.0\.0\.1:\d+/v1) ", said(tmp_path / "process"))):
            assert process.poll() is None, said(tmp_path / "process")
            time.sleep(0.05)
        body = {"messages": [{"role": "user", "content": "12345678"}], "max_tokens": 8, "temperature": 0}
        url, headers = f"{found[1]}/chat/completions", {"Content-Type": "application/json"}
        with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=30) as answer:
            told = json.load(answer)
        assert told["choices"][0]["message"]["role"] == "assistant" and told["usage"]["completion_tokens"] > 0
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, said(tmp_path / "process")
