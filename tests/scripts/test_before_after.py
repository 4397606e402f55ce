"""Both sides answer the same held-out prompts, each with its own weights."""

import json

import pytest
import torch

from areal_like.config import run_config as configs
from scripts import before_after
from tests.folders import write_folder

torch.set_num_threads(1)


@pytest.fixture
def run(tmp_path):
    """A run folder as a finished run leaves it, of a tiny chat model; no process is started."""
    before = write_folder(tmp_path / "before", "llama tied", seed=0)
    rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = [f"task.path={tmp_path}/rows.jsonl", f"task.tokenizer={before}", f"task.reward={__name__}:short"]
    task += ["task.heldout_fraction=0.5", "task.max_tokens=4"]
    config = configs.load(["base", "task=jsonl", *task, "model=folder", f"model.path={before}", "eval.prompts=5"])
    folder = tmp_path / "run"
    write_folder(folder / "checkpoints" / "final", "llama tied", seed=1)
    configs.save(config, folder / "config.yaml")
    return folder


def short(answer: str, response: str) -> float:
    return float(len(response) < 4)


def test_answers_differ_where_weights_do(run, capsys):
    found = run.parent / "found.json"
    assert before_after.main([str(run), "--show", "2", "--json", str(found)]) == 0
    data = json.loads(found.read_text())
    assert len(data["answers"]) == 5
    assert any(pair["before"]["text"] != pair["after"]["text"] for pair in data["answers"])
    for side in ("before", "after"):
        assert data[side] == sum(short("", pair[side]["text"]) for pair in data["answers"]) / 5
    assert data["difference"]["difference"] == pytest.approx(data["after"] - data["before"])
    said = capsys.readouterr().out
    assert "2 of 5 held-out prompts" in said and "prompts better" in said and "McNemar" in said


def test_the_same_weights_say_the_same(run, capsys):
    found = run.parent / "found.json"
    before_after.main([str(run), "--after", str(run.parent / "before"), "--json", str(found), "--prompts", "4"])
    assert "4 of 4 held-out prompts" in capsys.readouterr().out, "as many as there are"
    assert all(pair["before"] == pair["after"] for pair in json.loads(found.read_text())["answers"])


def test_a_run_that_has_not_ended_is_refused(run, capsys):
    (run / "checkpoints" / "final" / "config.json").unlink()
    with pytest.raises(SystemExit):
        before_after.main([str(run)])
    assert "the run must have ended" in capsys.readouterr().err
