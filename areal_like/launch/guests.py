"""Actors that join a run that lives, from this host: started, started again, and ended, beside the run's own launcher.

The run's files and its other processes are not theirs: a guest that dies too often is left out, and nothing else ends.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from areal_like.launch.local import Death, LocalLauncher, in_words, nothing
from areal_like.launch.plan import RoleSpec
from areal_like.process import EXIT_USER_ERROR


class Guests(LocalLauncher):
    """As `LocalLauncher`, of actors only. `given_up` says of which ones no more is expected, and why."""

    given_up: list[str]

    def start(self, roles: list[RoleSpec], check: Callable[[], None] = nothing) -> None:
        self.given_up, self._check = [], check
        (self.run / "logs").mkdir(exist_ok=True)
        for role in roles:
            self._start(role)

    def _command(self, role: RoleSpec, lives: int) -> list[str]:
        return [*super()._command(role, lives), "--guest"]

    def poll(self) -> bool:
        """Restart those that died. True when none is left."""
        for role, process in list(self._running.values()):
            code = process.poll()
            if code is None:
                continue
            del self._running[role.name]
            process.end(signal.SIGKILL)
            lives = self._lives[role.name]
            self.deaths.append(Death(role.name, process.pid, in_words(code), lives + 1))
            if code == EXIT_USER_ERROR or lives >= self.max_restarts:
                self.given_up.append(self._obituary(role, code, lives))
            else:
                self._lives[role.name] += 1
                self._start(role)
        return not self._running

    def stop(self) -> None:
        """End them all; what there is of their groups goes back to the buffer."""
        self._end_all()
