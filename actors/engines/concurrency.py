"""Adapts the number of sequences that an engine runs at once to its memory for keys and values: up by one, down by
half.

Additive increase, multiplicative decrease, as in congestion control: the final length of sequences is unknown. When
running sequences outgrow their memory and some must be put back, the limit falls to half of the running number. After a
time without that (`INTERVAL` decode steps of the embedded engine; one check of the servers' counters) it rises by one.
RollPacker's planner (arXiv 2509.21009) reacts to preemptions by the degree of tensor parallelism instead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

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


class AdaptiveSemaphore:
    """A semaphore with as many places as the rule allows now; waiters get them first come, first served.

        async with places: ...

    `most`: its largest number of places. Holders keep their place when the limit falls.
    """

    def __init__(self, most: int):
        self._rule = Concurrency(most, interval=1)
        self._taken = self._peak = 0  # now, and at most since the last `note`
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        return self._rule.limit

    def note(self, preemptions: int) -> None:
        """Note how many sequences were put back since the last call."""
        if preemptions:
            self._rule.pressed(self._peak)  # most may have ended meanwhile
        else:
            self._rule.step()
        self._peak = self._taken
        self._admit()

    async def __aenter__(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with suppress(ValueError):  # `_admit` has passed over it
                    self._waiting.remove(turn)
            else:  # it has just been given a place
                await self.__aexit__()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._taken -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._taken < self._rule.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken += 1
                self._peak = max(self._peak, self._taken)
                turn.set_result(None)
