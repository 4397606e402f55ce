"""multi_turn with an engine that plays back a script."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors import measures
from actors.resumption import Recorder
from actors.workflows import _opening, multi_turn
from areal_like.errors import EpisodeError
from areal_like.tasks.byte_tokens import byte_tokenizer
from areal_like.tasks.chat import TokenizerCodec
from areal_like.types import Completion, Limits, Outcome, PartialSample, Prompt
from tests.actors.desk import CHARACTERS, EOS, STOP, Characters, share_in_place

DESK = {"name": "tests.actors.desk:Desk"}
TEXT = Characters()
CALL = '{"expression": "1+1"}'


def prompt_of(question: str, answer: str) -> Prompt:
    return Prompt(TEXT.encode(question), answer, 40, (), TEXT, ({"role": "user", "content": question},))


class Engine:
    """Plays back the turns of `script`: texts, where `$` is EOS and `!` aborts after the turn."""

    def __init__(self, *script: str):
        self.script = list(script)
        self.calls: list[tuple[str, Limits]] = []

    async def generate(self, tokens: np.ndarray, limits: Limits, request: str = "") -> Completion:
        self.calls.append((TEXT.decode(tokens), limits))
        text = self.script.pop(0)
        said = [EOS if c == "$" else CHARACTERS.index(c) for c in text.rstrip("!")][: limits.max_tokens]
        stopped = bool(said) and said[-1] in STOP
        finish: Any = "abort" if text.endswith("!") else "stop" if stopped else "length"
        version = len(self.calls)
        return Completion(
            np.array(said, np.int32), np.full(len(said), -1.0, np.float32), [(version, len(said))], finish
        )


async def verifier(prompt: Prompt, tokens: np.ndarray) -> float:
    return share_in_place(TEXT.decode(tokens), prompt.answer)


def play(*script: str, environment: Any = DESK, most: int = 40, **knobs: Any) -> Any:
    engine: Any = Engine(*script)
    limits = Limits(most, 1.0, STOP, key=5)
    run = multi_turn(engine, verifier, prompt_of("12*34=", "00408"), limits, "r", environment=environment, **knobs)
    return asyncio.run(asyncio.wait_for(run, 30)), engine


def test_a_call_is_answered_and_the_answer_earns_the_rest():
    sample, engine = play("12*34=", "00408$")
    assert [text for text, _ in engine.calls] == ["12*34=", "12*34=12*34=00408"]
    assert TEXT.decode(sample.tokens) == "12*34=12*34=00408|00408"
    assert sample.loss_mask.tolist() == [True] * 6 + [False] * 6 + [True] * 6
    assert sample.runs == [(1, 12), (2, 6)]
    assert (sample.reward, sample.turn_rewards, sample.finish) == (1.0, [(5, 0.5), (17, 0.5)], "stop")
    assert engine.calls[1][1].offset == 12  # the same stream of random numbers, at the place of the token


def test_a_bad_call_is_told_and_the_model_may_try_again():
    sample, engine = play("12*=", "12*34=", "00408$")
    assert engine.calls[1][0] == "12*34=12*=?"
    assert sample.reward == pytest.approx(0.5 * 3 / 6 + 0.5)
    assert len(sample.turn_rewards) == 3 and sample.turn_rewards[1][1] == 0.0


@pytest.mark.parametrize("most, knobs", [(40, {"max_turns": 1}), (10, {})])
def test_an_episode_ends_where_turns_or_tokens_do(most, knobs):
    sample, engine = play("12*34=", "408$", most=most, **knobs)
    assert len(engine.calls) == 1 and TEXT.decode(sample.tokens) == "12*34=12*34="
    assert (sample.reward, sample.finish) == (0.5, "length")


def test_an_aborted_turn_rejects_the_sample():
    assert play("12*34=", "4!")[0] is None


def test_what_is_shown_first_is_the_users_and_not_the_models() -> None:
    """Behind the template's opening of the answer it would read as the model's text."""
    codec: Any = TokenizerCodec(byte_tokenizer(), chat=True)
    messages = ({"role": "system", "content": "Play."}, {"role": "user", "content": "Go: "})
    _, opened = _opening(Prompt(codec.opening(messages), 1, 40, (), codec, messages), "SFG")
    assert codec.decode(opened) == "[system]Play.[user]Go: SFG[assistant]" and messages[1]["content"] == "Go: "
    with pytest.raises(ValueError, match="no message for it"):
        _opening(Prompt(TEXT.encode("1="), "1", 40, (), TEXT), "2|")


class Closes:
    """Notes in `LOG` that it was closed; its last turn fails."""

    def reset(self, prompt: Prompt) -> str:
        return ""

    def step(self, action: str) -> Outcome:
        if "?" in action:
            raise RuntimeError("broken")
        return Outcome("|", 0.0, action == "9")

    async def close(self) -> None:
        LOG.append("closed")


LOG: list[str] = []


@pytest.mark.parametrize("script", [("9$",), ("1$", "4!"), ("1$", "1$"), ("?$",)], ids=["done", "cut", "long", "fails"])
def test_an_environment_is_closed_however_its_episode_ends(script: tuple[str, ...]) -> None:
    LOG.clear()
    with pytest.raises(RuntimeError, match="broken") if "?$" in script else nullcontext():
        play(*script, environment={"name": f"{__name__}:Closes"}, max_turns=2)
    assert LOG == ["closed"]


class Odd:
    """Does something else than an environment should, in `step` or, with `first`, in `reset`."""

    def __init__(self, *, does: str, first: bool = False):
        self.does, self.first = does, first

    async def reset(self, prompt: Prompt) -> Any:
        return await self.answer() if self.first else ""

    async def step(self, action: str) -> Any:
        return await self.answer()

    async def answer(self) -> Any:
        match self.does:
            case "wait":
                await asyncio.Event().wait()
            case "exit":
                raise SystemExit(3)
        if self.does == "flood":
            return "x" * 5001 if self.first else ("x" * 5001, 0.0, False)
        return {"nothing": None, "bytes": (b"1", 0.0, True), "words": ("", "high", True)}.get(self.does, 7)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "does, said",
    [("wait", " took more than 0.05 s"), ("exit", " exits: .*3")],
)
def test_an_environment_that_hangs_or_exits_is_not_the_models_fault(first: bool, does: str, said: str) -> None:
    timeout = 0.05 if does == "wait" else 10.0
    with pytest.raises(EpisodeError, match=f"the environment's {'reset' if first else 'step'}{said}"):
        play("1$", environment={"name": f"{__name__}:Odd", "does": does, "first": first}, timeout=timeout)


@pytest.mark.parametrize(
    "does, first, error, words",
    [
        ("flood", True, EpisodeError, "reset: got 5,001 characters, expected at most 5,000"),
        ("flood", False, EpisodeError, "step: got 5,001 characters"),
        ("nothing", False, TypeError, "step: got None"),
        ("words", False, TypeError, "step: .*high"),
        ("bytes", False, TypeError, "step: got b'1'"),
        ("number", True, TypeError, "reset: got 7"),
    ],
)
def test_other_answers_of_an_environment_are_errors(
    does: str, first: bool, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.scene.MOST_CHARACTERS", 5000)
    with pytest.raises(error, match=f"environment.{words}"):
        play("1$", environment={"name": f"{__name__}:Odd", "does": does, "first": first})


class Moody:
    """Answers something else each time: its answers do not follow from the actions."""

    count = 0

    def reset(self, prompt: Prompt) -> str:
        return ""

    def step(self, action: str) -> Outcome:
        Moody.count += 1
        return Outcome(f"{Moody.count}|", 0.0, Moody.count % 3 == 0)


def test_a_resume_with_other_answers_samples_anew_from_the_first_one_on() -> None:
    """The first turn was sampled from the same tokens and stays; the second answered a text not shown here."""
    limits, environment = Limits(40, 1.0, STOP), {"name": f"{__name__}:Moody"}
    record = PartialSample()

    def rolled(*script: str) -> Any:
        engine: Any = Recorder(Engine(*script), verifier, record)  # type: ignore[arg-type]
        run = multi_turn(engine, verifier, prompt_of("12*34=", "1"), limits, "r", environment=environment)
        return asyncio.run(asyncio.wait_for(run, 30))

    Moody.count = 0
    assert rolled("1$", "2$", "3!") is None
    Moody.count = 4
    sample = rolled("7$")
    assert TEXT.decode(sample.tokens) == "12*34=1|5|7"
    assert sample.loss_mask.tolist() == [True] * 2 + [False] * 2 + [True] * 2


def test_calls_of_tools_and_their_errors_are_counted_of_samples_that_are_trained():
    class Text(Characters):
        def decode(self, tokens: Any) -> str:
            return said.pop(0)

        def reply(self, text: str, *, closed: bool = True) -> np.ndarray:
            return np.zeros(2, np.int32)

    good, bad = (f'<tool_call>{{"name": "calculator", "arguments": {each}}}</tool_call>' for each in (CALL, "{}"))
    for trained in (False, True):
        measures.TURNS.clear()
        said = [good + bad, good, "7"]
        engine: Any = Engine("1$", "2$", "3$")
        prompt = replace(prompt_of("12*34=", "00408"), codec=Text())
        limits = Limits(4000, 1.0, STOP, trained=trained)
        asyncio.run(multi_turn(engine, verifier, prompt, limits, "r", environment={"name": "tools"}, max_turns=3))
        assert not said
    assert measures.TURNS == {"samples": 1, "turns": 3, "tokens": 6, "contexts": 1, "calls": 3, "errors": 1}
