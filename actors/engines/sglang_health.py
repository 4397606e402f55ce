"""Detects an SGLang server that is frozen while its process lives: a frozen scheduler, or a hanging HTTP side.

    tokens or weights arrive ──► `beat` ──► quiet is 0 ──► 10 s without ──► a probe ──► an answer ──► quiet is 0
                                                                              └── none for `patience` ──► it is frozen

The probe is SGLang's own (`/health_generate`): one token under an id of its own, in no metric. While requests run, the
server answers it after the next forward pass, ahead of all waiting requests. So a long prefill or a full server is no
failure; only a single forward pass longer than `patience` would count as one.

The clock stops while a server is paused for new weights (those calls have limits of their own). At most `_LONGEST_TICK`
counts at a time: if this process itself was stopped, its servers are not at fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PROBE_AFTER_SECONDS = 10.0
_ASK_AGAIN_SECONDS = 1.0
_LONGEST_TICK = 1.0


class Pulse:
    """Of one server. `patience`: seconds without any sign of work after which it counts as frozen. `probe`: has it made
    a token? Its own time limit bounds how long one that hangs is waited for."""

    def __init__(self, patience: float, probe: Callable[[], Awaitable[bool]]):
        self.patience, self._probe = patience, probe
        self._probe_after = min(PROBE_AFTER_SECONDS, patience / 4)
        self._quiet = 0.0
        self._asking: asyncio.Task[None] | None = None

    def beat(self) -> None:
        """Note a sign of work."""
        self._quiet = 0.0

    def tick(self, seconds: float) -> str:
        """Let seconds pass. Returns what is wrong; "" if nothing is."""
        self._quiet += min(seconds, _LONGEST_TICK)
        if self._quiet >= self.patience:
            return f"was frozen (no token for {self.patience:.0f} s)"
        if self._quiet >= self._probe_after and (self._asking is None or self._asking.done()):
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        return ""

    async def _ask(self) -> None:
        if await self._probe():
            self.beat()
        else:
            await asyncio.sleep(min(_ASK_AGAIN_SECONDS, self._probe_after))

    def stop(self) -> None:
        """Stop watching."""
        if self._asking:
            self._asking.cancel()
        self._asking, self._quiet = None, 0.0
