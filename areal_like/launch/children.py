"""Watches the processes of a run, restarts actors, and ends all of them reliably: the same for every launcher.

A launcher says where and how roles are started: `start(roles, check)` calls `check` during waits, which may raise;
`stop()` ends all, also after a `start` that has raised. `submission(roles)` is what must be submitted to start them
elsewhere, if anything, and `placement(roles)` describes where they will run. `ACROSS_HOSTS`: their sockets are not this
host's alone, and need keys. `ONE_PROCESS`: all roles are in the starter's own. What the starter then watches is the
launcher's `running`: this, or threads (`areal_like.launch.inline`).

`poll` is called many times a second and doesn't wait, a restart's delay included; `end` waits for a set time.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from areal_like.launch.outcome import Death, LastWords, RunFailed, has_ended_well, in_words, is_from_outside, may_resume
from areal_like.launch.plan import RoleSpec
from areal_like.launch.restarts import CommonFault, Limits, Restarts
from areal_like.process import EXIT_USER_ERROR, TERM_SECONDS
from areal_like.run_folder import has_stepped

GRACE_SECONDS = 10
"""Seconds for a checkpoint after SIGTERM, where nodes may be taken away; Slurm kills KillWait (30 s by default) after
it."""


class Process(Protocol):
    """A role's process, as subprocess has it."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float = ..., /) -> object: ...
    def send_signal(self, number: signal.Signals, /) -> None: ...
    def end(self, number: signal.Signals, /) -> None:
        """A signal to all of the process's group."""

    @property
    def remark(self) -> str:
        """What is known of its end besides the exit code; empty: nothing."""


class Children:
    """The roles' processes. `spawn(role, name)` starts one; `limits` says how often actors are restarted.

    `on_nodes`: the processes are on other nodes. Then their ids say nothing here, and an actor that is started again
    gets a name of its own: the one before may live on behind a node that was given up. `end_signal` tells one to end.
    `meaning(role, code)` is the exit code that a role's process stands for; it may raise RunStopped. `guests` end
    nothing when they die, and `poll` never raises. `left_out` are the actors that died too often, with their last
    words."""

    def __init__(
        self,
        run: Path,
        limits: Limits,
        spawn: Callable[[RoleSpec, str], Process],
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
        self._processes: dict[str, tuple[RoleSpec, Process]] = {}
        self._due: dict[str, tuple[float, RoleSpec]] = {}  # actors that wait to be started again, and until when
        self._actors: list[str] = []
        self._restarts, self._fault = Restarts(limits), CommonFault()
        self._lives: dict[str, int] = {}
        self._words = LastWords(run, on_nodes)

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, (_, process) in self._processes.items()}

    @property
    def none_left(self) -> bool:
        return not self._processes and not self._due

    def start(self, roles: list[RoleSpec]) -> None:
        (self.run / "logs").mkdir(exist_ok=True)
        self._actors = [role.name for role in roles if not role.essential]
        for role in roles:
            self._start(role)

    def _start(self, role: RoleSpec) -> None:
        self._words.begin(role.name)
        self._lives.setdefault(role.name, 0)
        self._processes[role.name] = (role, self._spawn(role, self._name(role)))

    def _name(self, role: RoleSpec) -> str:
        """The name under which the role's process is known."""
        lives = self._lives[role.name]
        return f"{role.name}.{lives + 1}" if self._on_nodes and lives else role.name

    def pause(self) -> None:
        """Let the learner stop at a checkpoint; `poll` then raises RunStopped."""
        if "learner" in self._processes:
            self._processes["learner"][1].send_signal(signal.SIGUSR1)

    def poll(self) -> bool:
        """Check for deaths, and restart the actors whose time has come. True once the learner has ended well. Raises
        RunFailed, RunStopped."""
        for role, process in list(self._processes.values()):
            code = process.poll()
            if code is None:
                continue
            code = self._meaning(role, code)
            del self._processes[role.name]
            process.end(signal.SIGKILL)  # what it has started must not live on
            if not role.essential:
                self._actor_died(role, process, code)
            elif has_ended_well(role.name, code):
                return True
            else:
                raise RunFailed(self._death_report(role, process, code), may_resume(self.run, code))
        now = time.monotonic()
        for role in [role for due, role in self._due.values() if due <= now]:
            del self._due[role.name]
            self._start(role)
        return False

    def _death_report(self, role: RoleSpec, process: Process, code: int) -> str:
        return self._words.death_report(role.name, code, self._lives[role.name], process.remark)

    def _actor_died(self, role: RoleSpec, process: Process, code: int) -> None:
        """Restart an actor, now or later, or leave it out. Raises RunFailed."""
        name, words, error = self._name(role), self._death_report(role, process, code), self._words.error(role.name)
        self._lives[role.name] += 1
        delay = None if code == EXIT_USER_ERROR else self._restarts.delay(role.name)
        pid = 0 if self._on_nodes else process.pid
        self.deaths.append(Death(name, pid, in_words(code), self._lives[role.name], delay, error))
        if delay is None:
            self.left_out[role.name] = words
        else:
            self._due[role.name] = (time.monotonic() + delay, role)
        if not self._guests:
            self._judge(role, code, words, error)

    def _judge(self, role: RoleSpec, code: int, words: str, error: str) -> None:
        """May the run continue after the death of an actor? Raises RunFailed."""
        if code == EXIT_USER_ERROR:
            raise RunFailed(words, resumable=False)
        cause = "" if is_from_outside(code) else error or in_words(code)
        if self._fault.strikes_all(role.name, cause, self._actors) and not has_stepped(self.run):
            many = f"all {len(self._actors)} actors fail alike" if len(self._actors) > 1 else "it fails again and again"
            raise RunFailed(f"{words}; {many}, before the first train step", resumable=False)
        left = len(self._actors) - len(self.left_out)
        if left < self.limits.min_alive:
            few = f"; {left} of {len(self._actors)} actors are left (actors.min_alive={self.limits.min_alive})"
            raise RunFailed(words + few * (len(self._actors) > 1), may_resume(self.run, code))

    def end(self) -> None:
        """End every process: by the signal that asks for it, then by SIGKILL for what is left after a moment."""
        processes = [process for _, process in self._processes.values()]
        for process in processes:
            process.end(self._end_signal)
        deadline = time.monotonic() + self._end_seconds
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in processes:
            process.end(signal.SIGKILL)  # also what a role may have left behind in its group
            process.wait()
        self._processes.clear()
        self._due.clear()
