"""How many sequences an engine runs at once where memory for keys and values is short: up by one, down by half. Pure.

Additive increase, multiplicative decrease (as congestion control does it, and for the same reason: nobody knows how
long sequences will become): each time that running sequences outgrow their memory, and some must be put back, the limit
falls to half of what ran; after `INTERVAL` decode steps in peace it rises by one. RollPacker's planner (arXiv
2509.21009) reacts to preemptions by the degree of tensor parallelism instead.
"""

from __future__ import annotations

INTERVAL = 32


class Concurrency:
    """`most`: the limit never rises above it. It begins there."""

    def __init__(self, most: int):
        self.limit = self._most = most
        self._peaceful = 0

    def pressed(self, running: int) -> None:
        """So many ran, and it was too much."""
        self.limit, self._peaceful = max(1, running // 2), 0

    def step(self) -> None:
        """A decode step went well."""
        self._peaceful += 1
        if self._peaceful % INTERVAL == 0:
            self.limit = min(self._most, self.limit + 1)
