"""Components of runs that look alive but learn nothing."""

import asyncio
import itertools

from areal_like.tasks.copying import Copy
from learners.losses.clipped import ppo

_calls = itertools.count()


class Hanging(Copy):
    """Its verifier never answers."""

    async def reward(self, prompt, tokens):
        await asyncio.sleep(3600)


def broken_later(batch, denominator):
    """A loss that works in its trial and in two train steps of two minibatches each, and is NaN from then on."""
    loss, observed = ppo(batch, denominator)
    return loss * (1.0 if next(_calls) < 5 else float("nan")), observed
