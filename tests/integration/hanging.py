"""An engine that hangs in one actor of a run, while that actor's event loop runs and sends heartbeats."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from actors.engines.timed_engine import TimedEngine


class Hanging(TimedEngine):
    """Decodes like the timed engine, until the first actor makes its `after`-th request. The file `marker` notifies
    the others, and the restarted actor, of this request. From then on no request gets a token, and none can be
    ended."""

    def __init__(self, *, marker: str = "", after: int = 100, median: float = 8.0):
        super().__init__(median=median)
        self._marker, self._after, self._hangs = Path(marker), after, False

    async def generate(self, tokens, limits, request=""):
        self._after -= 1
        if self._after < 0 and not self._marker.exists():
            with contextlib.suppress(FileExistsError):  # another actor was quicker
                self._marker.touch(exist_ok=False)
                self._hangs = True
        return await super().generate(tokens, limits, request)

    def _advance(self) -> None:
        if not self._hangs:
            super()._advance()

    def _abort(self, requests: Iterable) -> None:
        if not self._hangs:
            super()._abort(requests)
