"""A reward that can be cheated: the samples show it."""

import json
import re
from pathlib import Path

import pytest

from areal_like.run.samples import HELDOUT, TRAINED, read
from scripts import report, samples
from tests.folders import write_folder
from tests.integration.runs import summary, train

pytestmark = pytest.mark.integration


def any_character(answer: str, response: str) -> float:
    """Pays for any answer."""
    return 0.5 * bool(response)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    model = write_folder(folder / "model", "llama tied", seed=0)
    lines = [{"prompt": f"How many apples are {i} and 1?", "answer": str(i + 1)} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["task=jsonl", f"task.path={folder}/rows.jsonl", f"task.tokenizer={model}", "task.max_tokens=4"]
    options += [f"task.reward={__name__}:any_character", "task.heldout_fraction=0.5", "task.max_prompt_tokens=60"]
    options += ["model=folder", f"model.path={model}", "learner.lr=1e-3", "groups_per_batch=2", "run.steps=3"]
    options += ["eval.every=2", "eval.prompts=3", "actors.count=1"]
    return train(folder, "run", *options, config="configs/base.yaml")


def test_prompt_answer_and_reward_are_shown(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert samples.main([str(run), "--best", "--count", "2"]) == 0
    said = capsys.readouterr().out
    assert "reward 0.5" in said and "How many apples are" in said and "wanted: " in said
    texts = samples.Texts(run)
    best = samples.select(read(run, [TRAINED]), samples.parse([str(run), "--best", "--count", "2"]), texts)
    assert all(samples.coloured(record, texts, "age").plain in said for record in best), "what was said for it"


def test_the_first_page_of_the_report_shows_what_earns_the_reward(run: Path, tmp_path: Path) -> None:
    """A curve of this reward looks healthy; the samples beside it do not."""
    assert report.main([str(run), "--out", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    shown = json.loads(data)["samples"]
    trained = [each for each in shown if each["fate"] == "trained"]
    best = max(trained, key=lambda each: (each["step"], each["reward"]))
    assert "How many apples are" in best["prompt"] and best["reward"] == 0.5 and best["wanted"].isdigit()
    answer = "".join(best["tokens"])
    assert answer and answer != best["wanted"] and {"current", "advantage"} <= best["numbers"].keys()


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert samples.visible("a\x1b[2J\n\tb\x07é") == "a\\x1b[2J\n\tb\\x07é"


def test_all_held_out_answers_are_kept(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert samples.main([str(run), "--held-out", "--count", "0", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    versions = [each["version"] for each in found]  # the newest when the answer came
    assert versions == sorted(versions, reverse=True) and versions[:3] == [3] * 3 and versions[6:] == [0] * 3
    assert set(versions[3:6]) <= {2, 3}
    [second] = [each["reward"] for each in summary(run)["evaluations"] if each["version"] == 2]
    assert sum(each["reward"] for each in found[3:6]) / 3 == pytest.approx(second)
    assert all("apples" in each["prompt"] and each["wanted"] for each in found)
    assert {each.group for each in read(run, [HELDOUT])} == {0, 1, 2}


def test_samples_are_chosen_by_step_text_and_number(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert samples.main([str(run), "--step", "2", "--worst", "--count", "1", "--colour", "advantage"]) == 0
    assert capsys.readouterr().out.startswith("── step 2 ·")
    records = [record for record in read(run) if record.fate == TRAINED and "advantage" in record.numbers]
    assert samples.colours(records[0], "advantage") and samples.colours(records[0], "age")
    assert samples.main([str(run), "--search", "no such text"]) == 0
    assert "no such samples" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        samples.main([str(run.parent)])
    assert "no run folder" in capsys.readouterr().err
