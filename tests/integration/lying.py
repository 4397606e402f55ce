"""Components of a run in which an actor names wrong digests, and the buffer does not check them: the learner must."""

import os
from collections.abc import Sequence

LIE, LIES = "f" * 32, 3


def blind(rewards: Sequence[float], lengths: Sequence[int]) -> str:
    """A filter, which the buffer calls: from its first group on, digests are not checked."""
    from buffer import checks

    checks._check_digests = lambda *_: None
    return ""


async def lying(engine, reward, prompt, limits, request):
    """A workflow, which the actors call. One gives a wrong digest for the first version from 2 on it uses, in some
    groups: if it lied in all, each batch with one of them would be set aside, and no other version would ever come."""
    from actors.workflows import single_turn
    from areal_like.wire.client import ActorClient

    push, lied, groups = ActorClient.push, set(), iter(range(LIES))

    def push_a_lie(self, group) -> None:
        if self.name == "actor-1":
            lied.update([version for version in group.digests if version >= 2 and not lied][:1])
            if lied & group.digests.keys() and next(groups, None) is not None:
                group.digests.update({version: LIE for version in lied & group.digests.keys()})
        push(self, group)

    if not os.environ.get("LYING"):
        os.environ["LYING"] = "yes"
        ActorClient.push = push_a_lie
    return await single_turn(engine, reward, prompt, limits, request)
