"""When a dead actor is restarted: at once the first time, then after delays that double, up to a limit.

Deaths are counted per actor in a sliding window, as systemd does (StartLimitIntervalSec, StartLimitBurst): an actor
that fails once a day is restarted for years; one that fails at every start is soon left out. Nothing here waits.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
"""Seconds before the second restart within the window; each further delay is twice as long, up to the longest."""


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """An actor that has been restarted `max_restarts` times within `window` seconds and fails again is left out. The
    run ends when fewer than `min_alive` of its own actors are left."""

    max_restarts: int
    window: float = 3600.0
    min_alive: int = 1


class Restarts:
    """Counts deaths. `clock` is in seconds."""

    def __init__(self, limits: RestartLimits, clock: Callable[[], float] = time.monotonic):
        self.limits, self._clock = limits, clock
        self._deaths: dict[str, list[float]] = defaultdict(list)
        self._all, self._errors = 0, dict[str, str]()

    def delay(self, name: str) -> float | None:
        """Note a death. Returns the seconds until the next start; None: the actor has failed too often."""
        now, deaths = self._clock(), self._deaths[name]
        deaths[:] = [*(death for death in deaths if death >= now - self.limits.window), now]
        if len(deaths) > self.limits.max_restarts:
            return None
        return 0.0 if len(deaths) == 1 else min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(len(deaths) - 2, 30))

    def strikes_all(self, name: str, error: str, actors: Collection[str]) -> bool:
        """Note the error that ended an actor; empty: an outside cause. Has each of `actors` ended by the same one, and
        have there been two deaths at least? Numbers in errors don't count: ids and addresses differ."""
        self._all += 1
        self._errors[name] = re.sub(r"0x[0-9a-f]+|\d+", "#", error)
        found = {self._errors.get(actor, "") for actor in actors}
        return self._all > 1 and len(found) == 1 and found != {""}
