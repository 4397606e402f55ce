"""Over how many devices an engine spreads each of its servers, by how often memory for keys and values runs out. Pure.

RollPacker's parallelism planner (arXiv 2509.21009): the share of preempted requests up by more than 5 percentage points
over the step before → tensor parallelism (TP) doubles, which leaves each sequence more memory; no preemption for four
steps → it halves: where memory suffices, more servers decode faster. A step is the time between two weight updates.

Where we differ: the first TP is the user's, where the paper measures throughput beforehand. Requests that are under way
at an update count as requests of that step, since here updates do not wait for them. One that is preempted twice counts
twice. A step without any request is no step.
"""

from __future__ import annotations

RISE = 0.05
PEACE = 4


class Parallelism:
    """`least` <= `size` <= `most`, by factors of two; it begins with `least`."""

    def __init__(self, least: int, most: int):
        self.size = self._least = least
        self._most = most
        self._share, self._peaceful = 0.0, 0

    def step(self, requests: int, preemptions: int) -> int:
        """What the engine saw since the last call; returns the TP to go on with."""
        if requests < 1:
            return self.size
        share = preemptions / requests
        rise, self._share = share - self._share, share
        self._peaceful = 0 if preemptions else self._peaceful + 1
        if rise > RISE:
            self.size = min(self._most, 2 * self.size)
        elif self._peaceful == PEACE:
            self.size, self._peaceful = max(self._least, self.size // 2), 0
        return self.size
