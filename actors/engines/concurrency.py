"""Adapts the number of sequences that an engine runs at once to its memory for keys and values: up by one, down by
half.

Additive increase, multiplicative decrease, as in congestion control: the final length of sequences is unknown. When
running sequences outgrow their memory and some must be put back, the limit falls to half of the running number. After a
time without that (`INTERVAL` decode steps) it rises by one.
RollPacker's planner (arXiv 2509.21009) reacts to preemptions by the degree of tensor parallelism instead.
"""

from __future__ import annotations

INTERVAL = 32


class Concurrency:
    """The rule alone. `most`: the limit never rises above it. It begins there. `interval`: steps in peace per rise."""

    def __init__(self, most: int, interval: int = INTERVAL):
        self.limit = self._most = most
        self._interval, self._peaceful = interval, 0

    def pressed(self, running: int) -> None:
        """Note that `running` sequences outgrew the memory."""
        self.limit, self._peaceful = max(1, running // 2), 0

    def step(self) -> None:
        """Note a decode step without preemption."""
        self._peaceful += 1
        if self._peaceful % self._interval == 0:
            self.limit = min(self._most, self.limit + 1)
