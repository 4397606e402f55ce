"""single_turn and filler with an engine that plays back completions and records its requests."""

import asyncio
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.workflows import single_turn, with_filler
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
    async def both():
        sample = await single_turn(engine, reward, PROMPT, LIMITS, "r")
        return await with_filler(engine, sample, LIMITS, "r", filler) if sample and filler else sample

    return asyncio.run(asyncio.wait_for(both(), 30))


def test_a_completion_becomes_the_sample():
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
    assert limits == Limits(len(rest.tokens), 0.7, (), 123, 5 + len(answer.tokens), experts_from=len(tokens))
    assert sample.tokens.tolist() == [*PROMPT.tokens, *answer.tokens, *rest.tokens]
    assert sample.logprobs.tolist() == [*answer.logprobs, *rest.logprobs]
    assert sample.loss_mask.tolist() == [True] * len(answer.tokens) + [False] * len(rest.tokens)
    versions = [version for version, count in sample.runs for _ in range(count)]
    assert versions == [version for version, count in [*answer_runs, *filler_runs] for _ in range(count)]
    assert all(a[0] != b[0] for a, b in zip(sample.runs, sample.runs[1:], strict=False))
    assert sample.finish == "stop"


def test_an_aborted_answer_is_rejected_without_scoring_and_an_aborted_filler_too():
    async def reward(prompt, tokens):
        raise AssertionError("scored an aborted answer")

    engine = Engine(completion([(0, 2)], "abort"))
    assert turn(engine, reward, filler=3) is None and len(engine.calls) == 1
    assert turn(Engine(completion([(0, 2)]), completion([(0, 1)], "abort")), filler=3) is None
