"""Watches the processes of a run, restarts actors, and ends all of them reliably: the same for every launcher.

`poll` is called many times a second and never waits; `end` waits for a fixed time, and raises nothing."""

import logging
import re
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal_like.config.schema import Config
from areal_like.launch import outcome
from areal_like.launch.outcome import Death, RunFailed, nothing
from areal_like.launch.plan import RoleSpec
from areal_like.run.process import EXIT_USER_ERROR, TERM_SECONDS
from areal_like.run.run_folder import has_stepped

log = logging.getLogger(__name__)
GRACE_SECONDS = 10
"""Seconds for a checkpoint after SIGTERM, where nodes may be taken away. Slurm kills KillWait (30 s by default) later.
"""
KILL_SECONDS = 10.0
"""Seconds that all processes have to end after SIGKILL. One on a node that does not answer never reports its end."""


FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
"""Seconds before the second restart within the window; each further delay is twice as long, up to the longest."""


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """An actor that fails after `max_restarts` within `window` seconds is left out; a run without actors ends."""

    max_restarts: int
    window: float = 3600.0


def limits(config: Config) -> RestartLimits:
    return RestartLimits(config.actors.max_restarts, config.actors.restart_window)


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
        """Note the error that ended an actor (empty: an outside cause). Has each of `actors` ended by the same one,
        numbers in it aside, and have there been two deaths at least?"""
        self._all += 1
        self._errors[name] = re.sub(r"0x[0-9a-f]+|\d+", "#", error)
        found = {self._errors.get(actor, "") for actor in actors}
        return self._all > 1 and len(found) == 1 and found != {""}


class RoleProcess(Protocol):
    """A role's process, as subprocess has it."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float = ..., /) -> object: ...
    def send_signal(self, number: signal.Signals, /) -> None: ...
    def end(self, number: signal.Signals, /) -> None:
        """Send a signal to the whole process group."""


class Launcher:
    """Decides where and how roles start. `start(roles, check)` calls `check` while it waits; `check` may raise.
    `stop()` ends all roles, even after `start` raised. The starter watches `running`. `ACROSS_HOSTS`: sockets go beyond
    this host and need keys."""

    ACROSS_HOSTS = False

    def submission(self, roles: list[RoleSpec]) -> object:
        return None

    def placement(self, roles: list[RoleSpec]) -> str:
        """Where the roles will run, for people."""
        return ""


class Children:
    """The roles' processes. `spawn(role, name)` starts one; `limits` bounds how often actors are restarted.

    `on_nodes`: the processes are on other nodes: their ids mean nothing here, and a restarted actor gets a new name, as
    the old process may still run. `meaning(role, code)` translates an exit code; it may raise RunStopped. `guests`: no
    death ends the run, and `poll` never raises. `left_out`: actors that failed too often, with their last error."""

    def __init__(
        self,
        run: Path,
        limits: RestartLimits,
        spawn: Callable[[RoleSpec, str], RoleProcess],
        *,
        on_nodes: bool = False,
        end_signal: signal.Signals = signal.SIGTERM,
        meaning: Callable[[RoleSpec, int], int] = lambda _, code: code,
        guests: bool = False,
    ):
        self.run, self.limits = run, limits
        self.deaths: list[Death] = []
        self.left_out: dict[str, str] = {}
        self._spawn, self._on_nodes, self._guests = spawn, on_nodes, guests
        self._end_signal, self._end_seconds = end_signal, float(GRACE_SECONDS + 2 if on_nodes else TERM_SECONDS)
        self._meaning = meaning
        self._processes: dict[str, tuple[RoleSpec, RoleProcess]] = {}
        self._due: dict[str, tuple[float, RoleSpec]] = {}  # actors that wait for a restart, and until when
        self._actors: list[str] = []
        self._restarts, self._words = Restarts(limits), outcome.LastWords(run, on_nodes)
        self._lives: dict[str, int] = {}

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, (_, process) in self._processes.items()}

    @property
    def none_left(self) -> bool:
        return not self._processes and not self._due

    def start(self, roles: list[RoleSpec], check: Callable[[], None] = nothing) -> None:
        (self.run / "logs").mkdir(exist_ok=True)
        self._actors = [role.name for role in roles if not role.essential]
        for role in roles:
            check()
            self._start(role)

    def _start(self, role: RoleSpec) -> None:
        self._words.begin(role.name)
        self._lives.setdefault(role.name, 0)
        self._processes[role.name] = (role, self._spawn(role, self._name(role)))

    def _name(self, role: RoleSpec) -> str:
        lives = self._lives[role.name]
        return f"{role.name}.{lives + 1}" if self._on_nodes and lives else role.name

    def pause(self) -> None:
        """Let the learner stop at a checkpoint; `poll` then raises RunStopped."""
        if "learner" in self._processes:
            self._processes["learner"][1].send_signal(signal.SIGUSR1)

    def poll(self) -> bool:
        """Check for deaths, restart due actors. True: the learner ended without error. Raises RunFailed, RunStopped."""
        for role, process in list(self._processes.values()):
            code = process.poll()
            if code is None:
                continue
            code = self._meaning(role, code)
            del self._processes[role.name]
            process.end(signal.SIGKILL)  # its own children must end too
            if not role.essential:
                self._actor_died(role, process.pid, code)
            elif outcome.has_ended_well(role.name, code):
                return True
            else:
                report, _ = self._words.of(role.name, code, self._lives[role.name])
                raise RunFailed(report, outcome.may_resume(self.run, code))
        now = time.monotonic()
        for role in [role for due, role in self._due.values() if due <= now]:
            del self._due[role.name]
            self._start(role)
        return False

    def _actor_died(self, role: RoleSpec, pid: int, code: int) -> None:
        name, (report, error) = self._name(role), self._words.of(role.name, code, self._lives[role.name])
        self._lives[role.name] += 1
        delay = None if code == EXIT_USER_ERROR else self._restarts.delay(role.name)
        by_itself = not outcome.is_from_outside(code)
        pid = 0 if self._on_nodes else pid
        self.deaths.append(Death(name, pid, outcome.in_words(code), self._lives[role.name], delay, error, by_itself))
        if delay is None:
            self.left_out[role.name] = report
        else:
            self._due[role.name] = (time.monotonic() + delay, role)
        if self._guests:
            return
        if code == EXIT_USER_ERROR:
            raise RunFailed(report, resumable=False)
        cause = (error or outcome.in_words(code)) if by_itself else ""
        if self._restarts.strikes_all(role.name, cause, self._actors) and not has_stepped(self.run):
            many = f"all {len(self._actors)} actors fail alike" if len(self._actors) > 1 else "it fails again and again"
            raise RunFailed(f"{report}; {many}, before the first train step", resumable=False)
        if len(self.left_out) == len(self._actors):
            none = f"; none of {len(self._actors)} actors is left" * (len(self._actors) > 1)
            raise RunFailed(report + none, outcome.may_resume(self.run, code))

    def end(self) -> None:
        """End every process: `end_signal`, then SIGKILL. A warning names processes that may still run."""
        self._end_all(self._end_signal, self._end_seconds)
        left = self._end_all(signal.SIGKILL, KILL_SECONDS)  # also processes that a role left in its group
        if left:
            log.warning("%s: killed, and no end is known after %g s; it may still run", ", ".join(left), KILL_SECONDS)
        self._processes.clear()
        self._due.clear()

    def _end_all(self, number: signal.Signals, seconds: float) -> list[str]:
        """Returns the names of those that have not ended after `seconds`."""
        for _, process in self._processes.values():
            process.end(number)
        deadline, left = time.monotonic() + seconds, list[str]()
        for role, process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                left.append(self._name(role))
        return left
