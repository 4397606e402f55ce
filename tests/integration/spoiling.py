"""Components of a run in which actor-1 pushes a group that must not be trained, and the buffer does not check it."""

import os
from collections.abc import Sequence

import numpy as np

BAD_TOKEN = 1_000_000


def blind(rewards: Sequence[float], lengths: Sequence[int]) -> str:
    """A filter, which the buffer calls: from its first group on, neither pushes nor digests are checked."""
    from buffer import checks

    checks.check_payload = checks._check_digests = lambda *_: None
    return ""


async def poisoning(engine, reward, prompt, limits, request):
    """A workflow. From its first call on, one group of version 2 or later that actor-1 pushes gets a token that no
    model knows."""
    from actors.workflows import single_turn
    from areal_like.wire.actor_client import ActorClient

    push = ActorClient.push

    def push_spoilt(self, group) -> None:
        versions = [sample.oldest_version for sample in group.samples]
        if self.name == "actor-1" and min(versions) >= 2 and not os.environ.get("POISONED"):
            os.environ["POISONED"] = "yes"
            sample = group.samples[-1]
            sample.tokens = np.concatenate([sample.tokens[:-1], np.array([BAD_TOKEN], np.int32)])
        push(self, group)

    if not os.environ.get("POISONING"):
        os.environ["POISONING"] = "yes"
        ActorClient.push = push_spoilt
    return await single_turn(engine, reward, prompt, limits, request)
