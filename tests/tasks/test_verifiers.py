"""task=verifiers against the real package: rows, turns, tools, rewards, and answers that are code."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", "0.4")

from actors.agents.programs import AgentError
from actors.agents.workflow import agent as workflow
from actors.recorder import Recorder
from areal_like.errors import UserError
from areal_like.places import python_path
from areal_like.tasks.verifiers import Verifiers
from areal_like.tasks.verifiers_env import environment
from areal_like.types import Limits, Sample
from tests.actors.agents.test_conversation import TEMPLATE, Speaker

PLAY = "areal_like.tasks.verifiers_env:play"
ENV = "examples.verifiers_digits"
EOS, SIZES = 256, {"train": 96, "heldout": 4}


def make(seed: int = 0, **knobs: Any) -> Verifiers:
    return Verifiers(seed, **{"tokenizer": "bytes", "env": ENV, "max_tokens": 400} | knobs)


def made(kind: str, digits: int = 2) -> Verifiers:
    return make(args={"taskset": {"kind": kind, "digits": digits}})


def play(task: Verifiers, *said: str, row: int = 0, most: int = 400) -> tuple[Sample, Speaker]:
    """A sample whose model answers `said`, turn by turn."""
    prompt = task.prompt("train", row)
    engine = Speaker(prompt.codec, *said)

    async def scenario() -> Sample:
        limits = Limits(most, 1.0, (EOS,))
        noting = Recorder(engine, task.reward)  # type: ignore[arg-type]
        return await workflow(noting, task.reward, prompt, limits, "r", agent=PLAY, timeout=200)  # type: ignore[arg-type]

    return asyncio.run(scenario()), engine


def text(prompt: Any) -> str:
    return prompt.codec.decode(prompt.tokens)


def shown(task: Verifiers, sample: Sample) -> str:
    """The environment's text in a sample."""
    return task.prompt("train", 0).codec.decode(sample.tokens[sample.prompt_length :][~sample.loss_mask])


def digits(task: Verifiers) -> str:
    return task.prompt("train", 0).messages[-1]["content"]


def test_rows_are_the_tasksets_tasks_and_the_splits_share_none() -> None:
    rows = {split: [text(make().prompt(split, row)) for row in range(size)] for split, size in SIZES.items()}
    assert {split: make().size(split) for split in SIZES} == SIZES and len({*rows["train"], *rows["heldout"]}) == 100
    assert rows["train"][0].startswith("[user]") and rows["train"][0].endswith("[assistant]")
    assert [text(make(1).prompt("train", row)) for row in range(96)] != rows["train"]
    assert make(args={"taskset": {"kind": "tools"}}).digests() != make().digests()


def test_a_single_turn_is_scored_by_the_tasks_reward() -> None:
    task = make(system="Say it again.", args={"agent": {"sampling": {"temperature": 0.5}}})
    right = digits(task)
    for said, reward in ((right, 1.0), (right[0] + "x", 0.5), ("", 0.0)):
        sample, engine = play(task, said + "<eos>")
        assert sample.reward == reward and sample.loss_mask.all() and len(engine.asked) == 1
        prompt = task.prompt("train", 0)
        assert engine.asked[0][0] == prompt.tokens.tolist() and text(prompt).startswith("[system]Say it again.")
        assert asyncio.run(task.reward(prompt, prompt.codec.encode(said))) == reward


@pytest.mark.parametrize(("most", "finish", "reward"), [(400, "stop", 2 / 3), (12, "length", 1 / 3)])
def test_turns_go_on_until_the_environment_ends_or_no_room_is_left(most: int, finish: str, reward: float) -> None:
    task = made("turns", digits=3)
    a, b, c = digits(task)
    sample, engine = play(task, f"{a}<eos>", "x<eos>", f"{c}<eos>", most=most)
    assert (sample.finish, sample.reward, len(engine.asked)) == (finish, pytest.approx(reward), 3 if most > 12 else 1)
    assert shown(task, sample) == (f"[user]{b}[assistant][user]{c}[assistant]" if most > 12 else "")


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call><eos>"


def test_tools_are_called_and_code_from_the_model_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    task: Any = made("tools")
    task._tokenizer.chat_template = TEMPLATE
    a, b = map(int, digits(task))
    code = f"__import__('pathlib').Path('{tmp_path}/mark').touch()"
    hostile = call(code, {}), call("eval", {"source": code}), call("__class__", {}), call("add", {"a": code, "b": 1})
    sample, engine = play(task, *hostile, call("add", {"a": a, "b": b}), f"It is {a + b}.<eos>", most=4000)
    found = shown(task, sample)
    assert sample.reward == 1.0 and len(engine.asked) == 6 and not list(tmp_path.iterdir())
    assert "unknown tool 'eval'" in found and "valid integer" in found and f"[tool]{a + b}[assistant]" in found


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"agent": {"harness": {"id": "bash"}}}, "expected docker for harness 'bash'"),
        ({"agent": {"harness": {"id": "bash"}, "runtime": {"type": "docker"}}}, None),
        ({"id": "user-sim"}, "got the agents assistant, user, expected one"),
        ({"taskset": {"kind": "none"}}, "taskset.kind"),
    ],
)
def test_environments_that_run_code_or_cannot_be_trained_are_refused(args: dict[str, Any], problem: str | None) -> None:
    if problem is None:
        assert make(args=args).size("train") == 96
        return
    with pytest.raises(ValueError, match=problem):
        make(args=args).size("train")


def test_tasksets_without_end_or_prompt_and_other_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"can't be loaded: No module named 'examples\.none'"):
        make(env="examples.none").size("train")
    task = environment(ENV, "{}")[1][0].with_data(prompt=None)
    for name, value, problem in (("load", lambda self: [task], "'prompt' must be"), ("INFINITE", True, "infinite")):
        environment.cache_clear()
        monkeypatch.setattr(f"{ENV}.DigitsTaskset.{name}", value)
        with pytest.raises(ValueError, match=problem):
            make().size("train")
    environment.cache_clear()
    monkeypatch.setattr("areal_like.tasks.verifiers.version", lambda name: "0.1.10")
    with pytest.raises(UserError, match=r"got verifiers 0\.1\.10, expected 0\.4"):
        make()


@pytest.mark.parametrize(("runs", "problem"), [(0, "no network"), (2, "got 2 runs of the agent, expected 1")])
def test_an_environment_that_fails_is_a_crash(monkeypatch: pytest.MonkeyPatch, runs: int, problem: str) -> None:
    async def fails(self: Any, task: Any, agents: Any) -> None:
        for _ in range(runs):
            await agents.agent.run(task)
        if not runs:
            raise OSError("no network")

    monkeypatch.setattr(f"{ENV}.DigitsEnv.run", fails)
    with pytest.raises(AgentError, match=problem):
        play(make(), *["1<eos>"] * runs)
