"""Components of a run that a person, or an error, interrupts: each does so once per process."""

from typing import ClassVar

import numpy as np

from areal_like.tasks.copying import Copy
from buffer.rounds import SyncScheduler
from learners.losses.clipped import ppo

_seen: set[str] = set()


def once(place: str) -> bool:
    new = place not in _seen
    _seen.add(place)
    return new


class LookedInto(SyncScheduler):
    def ready_to_open(self, batch, trained_batches):
        if once("scheduler"):
            breakpoint()
        return super().ready_to_open(batch, trained_batches)


def verifier(given, answer):
    if once("verifier"):
        breakpoint()
    return float(given == answer)


class Parted(Copy):
    """A reward of two parts, or, for some answers, none."""

    reward_weights: ClassVar = {"even": 0.5}

    async def reward(self, prompt, tokens):
        if tokens[0] % 3 == 0:
            return None
        return {"place": await super().reward(prompt, tokens), "even": float(np.mean(tokens % 2 == 0))}


class Verified(Copy):
    """Its verifier would run in another process, if there were one."""

    def verification(self, prompt, tokens):
        return f"{__name__}:verifier", (tokens.tolist(), list(map(int, prompt.answer)))


async def workflow(engine, reward, prompt, limits, request):
    from actors.workflows import single_turn

    if once("workflow"):
        breakpoint()
    return await single_turn(engine, reward, prompt, limits, request)


def is_trial(batch) -> bool:
    """Is it the trial batch of a few tokens, before the run?"""
    return len(batch.mask) <= 2


def loss(batch, denominator):
    if not is_trial(batch) and once("loss"):
        breakpoint()
    return ppo(batch, denominator)


def broken(batch, denominator):
    if not is_trial(batch):
        raise ZeroDivisionError("this loss is broken")
    return ppo(batch, denominator)


def endless(batch, denominator):
    """A verifier that never returns."""
    while not is_trial(batch):
        pass
    return ppo(batch, denominator)
