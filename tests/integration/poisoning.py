"""Components of a run in which an actor pushes groups that can't be trained, and the buffer does not check them."""

import os
from collections.abc import Sequence

import numpy as np

from tests.integration.lying import blind as believe

BAD_TOKEN = 1_000_000


def blind(rewards: Sequence[float], lengths: Sequence[int]) -> str:
    """A filter, which the buffer calls: from its first group on, pushes are not checked."""
    from buffer import checks

    checks.check_payload = lambda *_: None
    return believe(rewards, lengths)


async def poisoning(engine, reward, prompt, limits, request):
    """A workflow, which the actors call. One group of actor-1, from version 2 or later, gets a token that no model
    knows."""
    from actors.workflows import single_turn
    from areal_like.wire.client import ActorClient

    push = ActorClient.push

    def push_a_poisoned_one(self, group) -> None:
        if self.name == "actor-1" and group.oldest_version >= 2 and os.environ.pop("TO_POISON", None):
            sample = group.samples[-1]
            sample.tokens = np.concatenate([sample.tokens[:-1], np.array([BAD_TOKEN], np.int32)])
        push(self, group)

    if not os.environ.get("POISONING"):
        os.environ["POISONING"] = os.environ["TO_POISON"] = "yes"
        ActorClient.push = push_a_poisoned_one
    return await single_turn(engine, reward, prompt, limits, request)
