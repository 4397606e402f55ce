"""multi_turn with an engine that plays back a script."""

import asyncio
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from actors import measures
from actors.multi_turn import _opening, multi_turn
from areal_like.errors import EpisodeError
from areal_like.interfaces import Outcome
from areal_like.tasks.chat import TokenizerCodec
from areal_like.tasks.text import byte_tokenizer
from areal_like.types import Completion, Limits, Prompt
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


def play(*script: str, environment: Any = DESK, most: int = 40, trained: bool = True, **knobs: Any) -> Any:
    engine: Any = Engine(*script)
    limits = Limits(most, 1.0, STOP, key=5, trained=trained)
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


@pytest.mark.parametrize("most, knobs", [(40, {"max_turns": 1}), (10, {})])
def test_an_episode_ends_where_turns_or_tokens_do(most, knobs):
    sample, engine = play("12*34=", "408$", most=most, **knobs)
    assert len(engine.calls) == 1 and TEXT.decode(sample.tokens) == "12*34=12*34="
    assert (sample.reward, sample.finish) == (0.5, "length")


def test_an_aborted_turn_rejects_the_sample():
    assert play("12*34=", "4!")[0] is None


def test_the_first_observation_is_the_users_and_not_the_models() -> None:
    """Behind the template's opening of the answer it would read as the model's text."""
    codec: Any = TokenizerCodec(byte_tokenizer(), chat=True)
    messages = ({"role": "system", "content": "Play."}, {"role": "user", "content": "Go: "})
    _, opened = _opening(Prompt(codec.opening(messages), 1, 40, (), codec, messages), "SFG")
    assert codec.decode(opened) == "[system]Play.[user]Go: SFG[assistant]" and messages[1]["content"] == "Go: "
    begun = {"role": "assistant", "content": "I take"}
    talk, opened = _opening(Prompt(codec.opening([*messages, begun]), 1, 40, (), codec, (*messages, begun)), "SFG")
    assert codec.decode(opened) == "[system]Play.[user]Go: SFG[assistant]I take" and talk[-1] == begun


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
    """Answers in `reset` or `step` with something else than an environment should."""

    def __init__(self, *, call: str, answer: str):
        self.call, self.odd = call, answer

    async def reset(self, prompt: Prompt) -> Any:
        return await self.answer() if self.call == "reset" else ""

    async def step(self, action: str) -> Any:
        return await self.answer()

    async def answer(self) -> Any:
        if self.odd == "wait":
            await asyncio.Event().wait()
        if self.odd == "exit":
            raise SystemExit(3)
        return {"flood": "x" * 5001, "word": ("", "high", True), "bytes": (b"1", 0, True)}.get(self.odd)


@pytest.mark.parametrize(
    "call, answer, error, words",
    [
        ("reset", "wait", EpisodeError, "0.05 s"),
        ("step", "wait", EpisodeError, "0.05 s"),
        ("step", "exit", EpisodeError, "exits"),
        ("reset", "flood", EpisodeError, "got 5,001 characters, expected at most 5,000"),
        ("step", "none", TypeError, "got None"),
        ("step", "word", TypeError, "high"),
        ("step", "bytes", TypeError, "got b'1'"),
    ],
)
def test_other_answers_of_an_environment_are_errors_and_not_the_models_fault(
    call: str, answer: str, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.multi_turn.MOST_CHARACTERS", 5000)
    with pytest.raises(error, match=f"environment.*{call}.*{words}"):
        timeout = 0.05 if answer == "wait" else 10.0
        play("1$", environment={"name": f"{__name__}:Odd", "call": call, "answer": answer}, timeout=timeout)


def test_calls_of_tools_and_their_errors_are_counted_of_samples_that_are_trained(monkeypatch: pytest.MonkeyPatch):
    good, bad = (f'<tool_call>{{"name": "calculator", "arguments": {each}}}</tool_call>' for each in (CALL, "{}"))
    monkeypatch.setattr(Characters, "decode", lambda codec, tokens: said.pop(0))
    monkeypatch.setattr(Characters, "reply", lambda codec, text, closed: np.zeros(2, np.int32))
    measures.TURNS.clear()
    for trained in (False, True):
        said = ["", good + bad, "", good, "", "7", "7"]  # the engine and the verifier decode, too
        play("1$", "2$", "3$", environment={"name": "tools"}, max_turns=3, trained=trained)
    assert measures.TURNS == {"samples": 1, "turns": 3, "tokens": 6, "contexts": 1, "calls": 3, "errors": 1}
