"""Actors that join a running run from this host: starts, restarts and ends them, beside the run's own launcher.

The run's files and its other processes are not theirs: a guest that dies too often is left out, and nothing else ends.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from areal_like.launch.local import LocalLauncher, nothing
from areal_like.launch.plan import RoleSpec
from areal_like.launch.restarts import Limits


class Guests(LocalLauncher):
    """As `LocalLauncher`, for actors only; never raises RunFailed. `keys` are the guests' (None: those of the run)."""

    def __init__(self, run: Path, limits: Limits, keys: Path | None = None):
        super().__init__(run, limits)
        self._keys = keys

    def start(self, roles: list[RoleSpec], check: Callable[[], None] = nothing) -> None:
        self._check = check
        (self.run / "logs").mkdir(exist_ok=True)
        for role in roles:
            self._start(role)

    def _command(self, role: RoleSpec, lives: int) -> list[str]:
        keys = ["--keys", str(self._keys.resolve())] if self._keys else []
        return [*super()._command(role, lives), "--guest", *keys]

    def poll(self) -> bool:
        """Restart those that died. True when none is left."""
        super().poll()
        return not self._running and not self._due

    def _judge(self, role: RoleSpec, code: int, words: str) -> None:
        """Leave a guest out: the run continues without it."""

    def stop(self) -> None:
        """End all guests; their unfinished groups go back to the buffer."""
        self._end_all()
