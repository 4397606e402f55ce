"""single_turn and filler with an engine that plays back completions and records its requests; experts of contexts."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.transcript import Transcript
from actors.workflows import single_turn, with_filler
from areal_like.types import Completion, Limits, Prompt

PROMPT = Prompt(np.array([7, 8, 9], np.int32), answer="a", max_tokens=4)
LIMITS = Limits(max_tokens=4, temperature=0.7, stop=(2,), key=123, offset=5)


def completion(runs, finish="length", first=100) -> Completion:
    tokens = np.arange(first, first + sum(n for _, n in runs), dtype=np.int32)
    return Completion(tokens, -tokens.astype(np.float32), list(runs), finish)


class Engine:
    """Plays back completions."""

    def __init__(self, *script):
        self.script, self.calls = list(script), []

    async def generate(self, tokens, limits, request=""):
        self.calls.append((tokens.tolist(), limits, request))
        return self.script.pop(0)


def turn(engine: Any, filler=0):
    scored = []

    async def reward(prompt, tokens):
        scored.append(tokens.tolist())
        return 0.25

    async def both():
        sample = await single_turn(engine, reward, PROMPT, LIMITS, "r")
        return await with_filler(engine, sample, LIMITS, "r", filler) if sample and filler else sample

    return asyncio.run(both()), scored


RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=5)


@given(RUNS, RUNS)
def test_filler_is_appended_masked_and_its_runs_are_joined(answer_runs, filler_runs):
    answer, rest = completion(answer_runs, "stop"), completion(filler_runs, "length", first=500)
    engine = Engine(answer, rest)
    sample, scored = turn(engine, filler=len(rest.tokens))
    assert scored == [answer.tokens.tolist()] and (sample.prompt_length, sample.reward) == (3, 0.25)
    tokens, limits, request = engine.calls[1]
    assert tokens == [*PROMPT.tokens, *answer.tokens] and request == "r"
    assert limits == Limits(len(rest.tokens), 0.7, (), 123, 5 + len(answer.tokens), experts_from=len(tokens))
    assert sample.tokens.tolist() == [*PROMPT.tokens, *answer.tokens, *rest.tokens] and sample.tokens.dtype == np.int32
    assert sample.logprobs.tolist() == [*answer.logprobs, *rest.logprobs] and sample.logprobs.dtype == np.float32
    assert sample.loss_mask.tolist() == [True] * len(answer.tokens) + [False] * len(rest.tokens)
    versions = [version for version, count in sample.runs for _ in range(count)]
    assert versions == [version for version, count in [*answer_runs, *filler_runs] for _ in range(count)]
    assert all(a[0] != b[0] for a, b in zip(sample.runs, sample.runs[1:], strict=False))
    assert sample.finish == "stop"


def test_an_aborted_answer_is_rejected_without_scoring_and_an_aborted_filler_too():
    assert turn(Engine(completion([(0, 2)], "abort")), filler=3) == (None, [])
    assert turn(Engine(completion([(0, 2)]), completion([(0, 1)], "abort")), filler=3)[0] is None


def test_the_experts_of_contexts_stand_at_their_tokens():
    def chosen(count: int, first: int) -> np.ndarray:
        return np.arange(first, first + count, dtype=np.uint8).reshape(count, 1, 1)

    transcript = Transcript(PROMPT.tokens[:2], replace(LIMITS, max_tokens=10))
    transcript.said(replace(completion([(0, 2)]), experts=chosen(3, 1)))
    transcript.forked(PROMPT.tokens, replace(LIMITS, max_tokens=10))
    assert transcript.limits().experts_from == 0 and transcript.room == 9
    assert transcript.fits(np.zeros(11, np.int32)) and not transcript.fits(np.zeros(12, np.int32))
    transcript.said(replace(completion([(0, 2)]), experts=chosen(4, 11)))
    assert transcript.limits().experts_from == 4
    sample = transcript.sample(1.0, "stop")
    assert sample.experts is not None and len(sample.experts) == len(sample.tokens) - 1
    assert sample.experts[:, 0, 0].tolist() == [1, 2, 3, 0, 11, 12, 13, 14]
