"""Samples in the terminal: any text of the model, any filter of the user, any place of the task."""

import json
from pathlib import Path

import msgspec
import pytest

from areal_like.run.samples import DROPPED, TRAINED, Kept, SampleLog, read
from scripts import eval, samples
from scripts.console.output import visible
from scripts.reporting.contents import contents
from tests.scripts.written_runs import HOSTILE, QUESTION, written_run


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    assert samples.main(list(argv)) == 0
    said = capsys.readouterr()
    return said.out, said.err


@pytest.mark.parametrize("answer", [HOSTILE, "[/b][red]:smile:[0.5]", "\x1b[2J\x9b31m\x07", "猫 = кот\u00a0!"])
def test_any_text_is_shown_as_it_is_and_commands_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    run = written_run(tmp_path / "a", answer=answer)
    out, _ = shown(capsys, str(run), "--count", "1")
    assert visible(answer) in out and QUESTION in out
    assert "\x1b" not in out and "\u202e" not in out and "\x9b" not in out


def test_a_sample_that_forks_shows_its_contexts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written_run(tmp_path / "a")
    path = run / "samples" / "trained.jsonl"
    record = msgspec.json.decode(path.read_bytes().splitlines()[0])
    prompt, said = record["tokens"][: record["prompt_length"]], record["tokens"][record["prompt_length"] :]
    tokens = record["tokens"] + prompt + said
    response = len(tokens) - len(prompt)
    masked = list(range(len(said), len(said) + len(prompt)))
    record |= {"tokens": tokens, "runs": [(record["runs"][0][0], response)], "masked": masked, "numbers": {}}
    path.write_bytes(msgspec.json.encode(record | {"forks": [len(said)]}) + b"\n")
    out, _ = shown(capsys, str(run))
    assert f"2 turns ({len(said)}, {len(said)}), 2 contexts" in out
    (found,) = json.loads(shown(capsys, str(run), "--json", "-")[0])
    assert found["forks"] == [len(said)] and found["turns"] == [found["text"][: len(said)]] * 2


def test_a_task_that_is_not_here_leaves_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written_run(tmp_path / "a")
    path = run / "config.yaml"
    path.write_text(path.read_text().replace(f"{written_run.__module__}:Apples", "gone:Apples"))
    out, err = shown(capsys, str(run), "--count", "1")
    assert "52 50 55 49" in out and "wanted" not in out
    assert "shown as numbers" in err and "gone" in err and err.count("\n") == 1


def test_nothing_that_fits_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written_run(tmp_path / "a")
    assert "none of 12 trained samples" in shown(capsys, str(run), "--step", "999")[0]
    (run / "samples" / "dropped.jsonl").unlink()
    assert "none of 0 dropped samples" in shown(capsys, str(run), "--dropped")[0]


def test_groups_that_left_early_are_shown_with_their_prompt_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written_run(tmp_path / "a")
    log = SampleLog(run, DROPPED, steps=30, most=None, done=30)
    log.write(Kept(DROPPED, 3, 3, 7, 0, [], 0, [], None, "", why="timed out: on 3 leases", actor="actor-0"))
    log.close()
    heading, *said = shown(capsys, str(run), "--dropped", "--search", "timed")[0].splitlines()
    assert heading.endswith("group 7 · no answer · timed out: on 3 leases") and said == [QUESTION, "wanted: 12"]
    assert "no answer" not in shown(capsys, str(run), "--dropped", "--worst", "--count", "0")[0], "it has no reward"
    on_page = {each["why"].partition(":")[0]: each for each in contents(run)["samples"]}["timed out"]
    assert (on_page["prompt"], on_page["reward"], on_page["tokens"]) == (QUESTION, None, [])


def test_an_answer_of_a_fixed_length_was_not_cut(tmp_path: Path) -> None:
    run = written_run(tmp_path / "a")
    (record, *_) = read(run, [TRAINED])
    record.finish = "length"
    assert "length (cut at its limit)" in samples.heading(record) and "cut" not in samples.heading(record, stops=False)
    assert not samples.Texts(run).stops, "nothing ends its answers early"


def test_a_terminal_without_utf8_shows_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written_run(tmp_path / "a", answer="猫")
    file = (tmp_path / "out").open("w", encoding="ascii")
    monkeypatch.setattr("sys.stdout", file)
    assert samples.main([str(run), "--count", "1"]) == 0
    file.close()
    assert "\\u732b" in (tmp_path / "out").read_text()


def test_answers_of_a_model_command_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    eval.show_answers("a", [eval.Answers("\x1b[2J?", "1", ["\x1b]0;x\x07"], [1.0], [1], 0)])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "\\x1b[2J?" in out
