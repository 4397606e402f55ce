"""Components of a run in which actor-1 pushes groups that must not be trained, and the buffer does not check them."""

import os
from collections.abc import Sequence

import numpy as np

LIE, LIES = "f" * 32, 3
BAD_TOKEN = 1_000_000


def blind(rewards: Sequence[float], lengths: Sequence[int]) -> str:
    """A filter, which the buffer calls: from its first group on, neither pushes nor digests are checked."""
    from buffer import checks

    checks.check_payload = checks._check_digests = lambda *_: None
    return ""


def pushing(name: str, spoil) -> None:
    """From now on, in this process, `spoil` changes the groups that actor-1 pushes."""
    from areal_like.wire.actor_client import ActorClient

    push = ActorClient.push

    def push_spoilt(self, group) -> None:
        if self.name == "actor-1":
            spoil(group)
        push(self, group)

    if not os.environ.get(name):
        os.environ[name] = "yes"
        ActorClient.push = push_spoilt


async def lying(engine, reward, prompt, limits, request):
    """A workflow, which the actors call. One gives a wrong digest for the first version from 2 on it uses, in some
    groups: if it lied in all, each batch with one of them would be set aside, and no other version would ever come."""
    from actors.workflows import single_turn

    lied, groups = set(), iter(range(LIES))

    def lie(group) -> None:
        lied.update([version for version in group.digests if version >= 2 and not lied][:1])
        if lied & group.digests.keys() and next(groups, None) is not None:
            group.digests.update({version: LIE for version in lied & group.digests.keys()})

    pushing("LYING", lie)
    return await single_turn(engine, reward, prompt, limits, request)


async def poisoning(engine, reward, prompt, limits, request):
    """A workflow. One group of version 2 or later gets a token that no model knows."""
    from actors.workflows import single_turn

    def poison(group) -> None:
        if min(sample.oldest_version for sample in group.samples) >= 2 and not os.environ.get("POISONED"):
            os.environ["POISONED"] = "yes"
            sample = group.samples[-1]
            sample.tokens = np.concatenate([sample.tokens[:-1], np.array([BAD_TOKEN], np.int32)])

    pushing("POISONING", poison)
    return await single_turn(engine, reward, prompt, limits, request)
