"""Workflows: how one sample of a prompt is rolled out. One async function per style of rollout.

The worker starts `lease.launch` of them at once; each calls engine and verifier, and returns a `Sample`. None rejects
the sample, an error fails it, never the run; the worker counts both. A group that loses its actor starts again on
another one.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from actors.transcript import Transcript
from areal_like.interfaces import RewardFunction, RolloutEngine
from areal_like.types import Limits, Prompt, Sample, merged


async def single_turn(
    engine: RolloutEngine, reward: RewardFunction, prompt: Prompt, limits: Limits, request: str
) -> Sample | None:
    """One completion of the prompt, scored. None where it was aborted: a cut answer earns no fair reward."""
    answer = await engine.generate(prompt.tokens, limits, request)
    if answer.finish == "abort":
        return None
    transcript = Transcript(prompt.tokens, limits)
    transcript.said(answer)
    return transcript.sample(await reward(prompt, answer.tokens), answer.finish)


async def with_filler(engine: Any, sample: Sample, limits: Limits, request: str, count: int) -> Sample | None:
    """The sample with `count` loss-masked tokens at its end (`areal_like.tasks.generated`), which no stop token
    ends. They continue its stream of random numbers. None if they were aborted."""
    start, end = sample.contexts[-1]
    offset = limits.offset + sample.response_length
    more = replace(limits, max_tokens=count, stop=(), stop_ids=(), offset=offset, experts_from=end - start)
    more = replace(more, stop_texts=None)
    rest = await engine.generate(sample.tokens[start:], more, request)
    if rest.finish == "abort":
        return None
    experts = sample.experts
    return replace(
        sample,
        tokens=np.concatenate([sample.tokens, rest.tokens]),
        logprobs=np.concatenate([sample.logprobs, rest.logprobs]),
        loss_mask=np.pad(sample.loss_mask, (0, len(rest.tokens))),
        runs=merged(sample.runs + rest.runs),
        experts=None if experts is None else np.pad(experts, ((0, len(rest.tokens)), (0, 0), (0, 0))),
    )
