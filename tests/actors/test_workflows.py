"""single_turn with an engine that plays back completions and records its requests."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.workflows import single_turn
from areal_like.types import Completion, Limits, Prompt

PROMPT = Prompt(np.array([7, 8, 9], np.int32), answer="a", max_tokens=4)
LIMITS = Limits(max_tokens=4, temperature=0.7, stop=(2,), key=123, offset=5)


def completion(runs, finish="length", first=100) -> Completion:
    count = sum(n for _, n in runs)
    tokens = np.arange(first, first + count, dtype=np.int32)
    return Completion(tokens, -tokens.astype(np.float32), list(runs), finish)


class Engine:
    """Plays back `script`: completions, errors, or async functions that return a completion."""

    def __init__(self, *script):
        self.script = list(script)
        self.calls = []

    async def generate(self, tokens, limits, request=""):
        self.calls.append((tokens.tolist(), limits, request))
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        return await step() if callable(step) else step


async def one(prompt, tokens) -> float:
    return 1.0


def turn(engine: Any, reward: Any = one, filler=0):
    return asyncio.run(asyncio.wait_for(single_turn(engine, reward, PROMPT, LIMITS, "r", filler), 30))


def test_without_filler_the_completion_becomes_the_sample():
    seen = []

    async def reward(prompt, tokens):
        seen.append((prompt, tokens.tolist()))
        return 0.25

    engine = Engine(completion([(3, 2), (4, 1)], "stop"))
    sample = turn(engine, reward)
    assert engine.calls == [([7, 8, 9], LIMITS, "r")]
    assert seen == [(PROMPT, [100, 101, 102])]
    assert sample.tokens.tolist() == [7, 8, 9, 100, 101, 102] and sample.tokens.dtype == np.int32
    assert sample.prompt_length == 3 and sample.response_length == 3
    assert sample.logprobs.tolist() == [-100, -101, -102] and sample.logprobs.dtype == np.float32
    assert sample.loss_mask.tolist() == [True] * 3 and sample.loss_mask.dtype == np.bool_
    assert (sample.runs, sample.reward, sample.finish) == ([(3, 2), (4, 1)], 0.25, "stop")


RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=5)


@given(RUNS, RUNS)
def test_filler_is_appended_masked_and_its_runs_are_joined(answer_runs, filler_runs):
    answer, rest = completion(answer_runs, "stop"), completion(filler_runs, "length", first=500)
    engine = Engine(answer, rest)
    sample = turn(engine, filler=len(rest.tokens))
    tokens, limits, request = engine.calls[1]
    assert tokens == [*PROMPT.tokens, *answer.tokens] and request == "r"
    assert limits == Limits(len(rest.tokens), 0.7, (), 123, 5 + len(answer.tokens))
    assert sample.tokens.tolist() == [*PROMPT.tokens, *answer.tokens, *rest.tokens]
    assert sample.logprobs.tolist() == [*answer.logprobs, *rest.logprobs]
    assert sample.loss_mask.tolist() == [True] * len(answer.tokens) + [False] * len(rest.tokens)
    versions = [version for version, count in sample.runs for _ in range(count)]
    assert versions == [version for version, count in [*answer_runs, *filler_runs] for _ in range(count)]
    assert all(a[0] != b[0] for a, b in zip(sample.runs, sample.runs[1:], strict=False))
    assert sample.finish == "stop"


def test_the_verifier_sees_the_answer_only_and_works_while_the_filler_is_decoded():
    begun = asyncio.Event()
    decoded = asyncio.Event()
    events: list[object] = []

    async def reward(prompt, tokens):
        events.append(("scoring", tokens.tolist()))
        begun.set()
        await decoded.wait()
        return 0.5

    async def filler():
        await begun.wait()  # never comes if the verifier waits for the filler
        events.append("filler")
        decoded.set()
        return completion([(0, 3)], first=500)

    sample = turn(Engine(completion([(0, 2)]), filler), reward, filler=3)
    assert events == [("scoring", [100, 101]), "filler"] and sample.reward == 0.5


def test_an_aborted_answer_is_rejected_without_scoring():
    async def reward(prompt, tokens):
        raise AssertionError("scored an aborted answer")

    engine = Engine(completion([(0, 2)], "abort"))
    assert turn(engine, reward, filler=3) is None
    assert len(engine.calls) == 1


@pytest.mark.parametrize("outcome", ["abort", "error"])
def test_a_cut_or_failed_filler_ends_the_scoring(outcome):
    begun = asyncio.Event()
    cancelled = []

    async def reward(prompt, tokens):
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def filler():
        await begun.wait()
        if outcome == "error":
            raise RuntimeError("engine failed")
        return completion([(0, 1)], "abort")

    async def run() -> None:
        engine: Any = Engine(completion([(0, 2)]), filler)
        sample = single_turn(engine, reward, PROMPT, LIMITS, "r", 3)
        if outcome == "abort":
            assert await sample is None
        else:
            with pytest.raises(RuntimeError, match="engine failed"):
                await sample
        await asyncio.sleep(0)
        assert cancelled == [True]  # within the loop: at its end asyncio.run would cancel it anyway

    asyncio.run(run())


@pytest.mark.parametrize("filler", [0, 3])
def test_a_failing_verifier_fails_the_sample(filler):
    async def reward(prompt, tokens):
        raise ValueError("bad answer")

    with pytest.raises(ValueError, match="bad answer"):
        turn(Engine(completion([(0, 2)]), completion([(0, 3)])), reward, filler)
