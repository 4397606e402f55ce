"""Tool calls are read from the turns of a sample, and shown in the terminal and the report."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from actors.tools import Tools
from areal_like.run.samples import DROPPED, TRAINED, Kept, SampleLog, kept, unanswered
from areal_like.types import Sample
from scripts import samples
from scripts.following.tool_calls import Call, Marks, calls_of, marks_of
from scripts.reporting.contents import contents
from tests.scripts.written_runs import QUESTION, cut, written_run

MULTI_TURN = "workflow={name: multi_turn, environment: {name: tools}}"
SAID = [
    'I ask.<tool_call>{"name": "calculator", "arguments": {"expression": "6*2"}}</tool_call>',
    '<tool_call>{"name": "calculator", "arguments": {"expression": "6*"}}</tool_call><tool_call>12</tool_call>',
    '<tool_call>{"name": "oracle"}</tool_call>',
]


def answered(said: str) -> str:
    """Answered by the environment that answers calls in a run."""
    return asyncio.run(Tools().step(said)).observation


def talk(folder: Path, *, ends: bool = True) -> Kept:
    """A sample of four turns, the last without a call; `ends`: its last call has no answer."""
    parts = [
        (text, shown) for said in SAID for text, shown in ((said, True), (f"\nuser\n{answered(said)}\nmodel\n", False))
    ]
    parts = parts[:-1] if ends else [*parts, ("12", True)]
    question = np.frombuffer(QUESTION.encode(), np.uint8).astype(np.int32)
    response = np.frombuffer("".join(text for text, _ in parts).encode(), np.uint8).astype(np.int32)
    mask = np.concatenate([np.full(len(text.encode()), own) for text, own in parts])
    taken = np.append(np.full(len(response) - 1, np.nan), 0.5)
    sample = Sample(
        np.concatenate([question, response]), len(question), np.full(len(response), -0.5, np.float32), mask,
        [(0, len(response))], 1.0, "length" if ends else "stop",
    )  # fmt: skip
    record = kept(TRAINED, 21, 21, (99, 0), sample, numbers={"penalty/length": taken})
    log = SampleLog(folder, TRAINED, steps=30, most=None, done=30)
    assert log.write(record)
    log.close()
    return record


def test_calls_have_name_arguments_and_result_by_turn() -> None:
    found = calls_of([(said, answered(said)) for said in SAID] + [("12", "")], Marks())
    assert [(call.turn, call.name, call.arguments) for call in found] == [
        (1, "calculator", '{"expression": "6*2"}'),
        (2, "calculator", '{"expression": "6*"}'),
        (2, "", "12"),
        (3, "oracle", "{}"),
    ]
    assert [call.failed for call in found] == [False, True, True, True]
    assert found[0].result == "12" and found[3].result == "error: there is no tool 'oracle'; there are calculator"
    assert calls_of([("<tool_call>cut", "")], Marks()) == [Call(1, "", "cut", None)], "the sample ended within it"


@pytest.mark.parametrize(
    "text", ['{"name": "a", "arguments": ' + "[" * 3000, '"a"', "[]", "null", '{"arguments": 1}', ""]
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert calls_of([(f"<tool_call>{text}</tool_call>", "")], Marks()) == [Call(1, "", text, None)]


def test_marks_are_those_of_the_workflow() -> None:
    assert marks_of({"name": "single_turn"}) is None
    assert marks_of({"name": "multi_turn", "environment": {"name": "tools"}}) == Marks()
    own = {"name": "tools", "call_marks": ["[", "]"], "result_marks": ["", ""]}
    assert marks_of({"name": "multi_turn", "environment": own}) == Marks(("[", "]"), ("", ""))
    assert marks_of({"name": "mine:Workflow", "call_marks": ["<", ">"]}) == Marks(("<", ">"))
    assert calls_of([("[x]", " 7 ")], Marks(("[", "]"), ("", ""))) == [Call(1, "", "x", "7")]


def test_the_terminal_shows_calls_results_and_what_was_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written_run(tmp_path / "a", MULTI_TURN)
    talk(run)
    assert samples.main([str(run), "--count", "1"]) == 0
    said = capsys.readouterr().out
    assert "3 turns (87, 105, 41)" in said and ", 2 failed" in said and "reward 1 · penalty/length 0.5 ·" in said
    assert 'turn 1: calculator {"expression": "6*2"} → 12\n' in said
    assert "turn 2: (no call that can be read) 12 → error: a call is" in said
    assert "turn 3: oracle {} → not answered\n" in said
    assert samples.main([str(run), "--count", "1", "--json", "-"]) == 0
    calls = json.loads(capsys.readouterr().out)[0]["calls"]
    assert calls[0] == {"turn": 1, "name": "calculator", "arguments": '{"expression": "6*2"}', "result": "12"}


def test_the_report_has_the_calls(tmp_path: Path) -> None:
    run = written_run(tmp_path / "a", MULTI_TURN)
    talk(run, ends=False)
    found = [each for each in contents(run)["samples"] if each["calls"]]
    assert [each["group"] for each in found] == [99]
    assert found[0]["calls"][0] == [1, "calculator", '{"expression": "6*2"}', "12"]


def test_groups_without_an_answer_are_shown_with_their_prompt_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written_run(tmp_path / "a")
    log = SampleLog(run, DROPPED, steps=30, most=None, done=30)
    log.write(unanswered(3, 3, 7, "timed out: on 3 leases", "actor-0"))
    log.close()
    assert samples.main([str(run), "--dropped", "--search", "timed"]) == 0
    said = capsys.readouterr().out
    assert "group 7 · no answer · timed out: on 3 leases" in said and said.count("─ ") <= 1
    assert QUESTION in said and "wanted: 12" in said and "reward" not in said
    assert samples.main([str(run), "--dropped", "--worst", "--count", "0"]) == 0
    assert "no answer" not in capsys.readouterr().out, "it has no reward"
    shown = contents(run)["samples"]
    (lost,) = (each for each in shown if each["why"].startswith("timed out"))
    assert lost["reward"] is None and lost["prompt"] == QUESTION and lost["tokens"] == []


def test_what_cut_samples_said_is_shown_with_their_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written_run(tmp_path / "a")
    log = SampleLog(run, DROPPED, steps=30, most=None, done=30)
    log.write(cut(b"It is 7 or so"))
    log.close()
    assert samples.main([str(run), "--dropped", "--search", "Or So"]) == 0
    heading, *said = capsys.readouterr().out.splitlines()
    assert heading.endswith("group 7, sample 1 · no reward · 13 tokens, abort · 0 versions old · cut: too slow")
    assert said == [QUESTION, "It is 7 or so", "wanted: 12"]
    assert samples.main([str(run), "--dropped", "--search", "cut", "--json", "-"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["prompt"] == QUESTION and shown["text"] == "It is 7 or so" and shown["reward"] is None
    (lost,) = (each for each in contents(run)["samples"] if each["why"].startswith("cut"))
    assert lost["prompt"] == QUESTION and "".join(lost["tokens"]) == "It is 7 or so" and lost["reward"] is None
