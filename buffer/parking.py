"""Which actors leave a round early, so that the learner gets what they ran on: the rule. No I/O, no clock.

In a round that streams, groups reach the learner while others still run, and towards the end every actor decodes a few
sequences only. RollPacker's stream trainer (arXiv 2509.21009) then gives half of the rollout devices to training: tried
once per 5 % of the round's responses between 20 % and 50 % done, if what still runs finds room on the others. Requests
are moved by recomputation. Here whole actors are *parked*: their groups go on elsewhere from their tokens, and they get
no more training leases until the next round begins (`buffer.leasing.park`). That frees processors where actors and the
learner share a machine: no process is given more threads for it, the operating system lets the learner run on what is
idle. The learner's number of threads stays as it is, since the bits of a sum depend on it; `learner.threads` says how
many it may use then.

We differ in that the share may be chosen, and in that a round parks once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

EARLIEST, LATEST = 0.2, 0.5
TRIES = 20
"""Per round: one per 5 %."""


class Load(NamedTuple):
    """An actor of the round: the `slots` of its engine, and how many `sequences` it still runs."""

    name: str
    slots: int
    sequences: int


class Parking:
    """Parks `share` of the actors, rounded down, once in a round; those with the least to move."""

    def __init__(self, share: float = 0.0):
        if not 0 <= share < 1:
            raise ValueError(f"scheduler.park is a share of the actors: at least 0 (off) and below 1, not {share}")
        self.share = share
        self._tried = -1

    def begin(self) -> None:
        """A round begins."""
        self._tried = -1

    def choose(self, done: float, to_start: int, actors: Sequence[Load]) -> list[str]:
        """Who is to be parked now. `done`: share of the round's responses that have ended; `to_start` sequences of it
        have not begun."""
        number = int(done * TRIES + 1e-9)
        if not EARLIEST <= done <= LATEST or number <= self._tried:
            return []
        self._tried = number
        emptiest = sorted(actors, key=lambda actor: actor.sequences)
        count = int(self.share * len(actors))
        parked, others = emptiest[:count], emptiest[count:]
        running = sum(actor.sequences for actor in actors) + to_start
        if not parked or running > sum(actor.slots for actor in others):
            return []
        self._tried = TRIES
        return [actor.name for actor in parked]
