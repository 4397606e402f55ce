"""Starts a plan as processes of this machine, watches them, restarts actors, and ends them all for certain.

Each role leads a process group of its own, so that what it has started ends with it. `poll` is called many times a
second; nothing here waits, except `stop`, and that for a set time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from areal_like.launch import forks
from areal_like.launch.forks import environment
from areal_like.launch.plan import RoleSpec
from areal_like.process import (
    EXIT_NODE_FAILED,
    EXIT_PAUSED,
    EXIT_STOPPED,
    EXIT_TERMINATED,
    EXIT_USER_ERROR,
    RENDEZVOUS,
    REPOSITORY,
    TERM_SECONDS,
)

FULL_BYTES = 1 << 16
"""A disk with less than this left counts as full."""


class RunFailed(RuntimeError):
    """A process without which the run can't go on has ended; the text says which, how, and its last words."""


class RunStopped(RuntimeError):
    """The run has ended early and can be gone on with; the text says how. `paused`: that is to happen by itself (a
    signal told the learner to stop, or its node is gone); else a person has stopped it."""

    def __init__(self, text: str, paused: bool):
        super().__init__(text)
        self.paused = paused


@dataclass(frozen=True, slots=True)
class Death:
    """A process that died and was started again: its name, its id (0: not known here), how it died, and how often that
    has happened."""

    name: str
    pid: int
    how: str
    count: int


class Group(subprocess.Popen):
    """A role's process, which leads a process group."""

    def end(self, number: signal.Signals) -> None:
        """A signal to all of the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def spawn(command: list[str], threads: int, log: Path) -> Group:
    """Start a role's command; what it says is appended to `log`."""
    with log.open("ab") as output, _blocked(signal.SIGUSR1):
        return Group(
            command,
            cwd=REPOSITORY,
            env=environment(threads),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in the terminal reaches the starter only, which ends the others
        )


def nothing() -> None:
    """Nothing to check."""


class LocalLauncher:
    """`max_restarts` per actor. `ready_timeout` seconds is what roles wait for one another at the start.

    Other launchers differ in `_spawn` or `_command`, in how a process is told to end, and in the time that it gets.
    """

    ACROSS_HOSTS = False
    """Are the processes on several hosts? Then their sockets are not this host's alone, and need keys."""
    END_SIGNAL = signal.SIGTERM
    END_SECONDS = float(TERM_SECONDS)

    def __init__(self, run: Path, max_restarts: int, *, ready_timeout: Annotated[float, "(0, 1e7]"] = 120.0):
        self.run, self.max_restarts, self.ready_timeout = run, max_restarts, ready_timeout
        self.deaths: list[Death] = []
        self._sockets: Path | None = None
        self._running: dict[str, tuple[RoleSpec, Any]] = {}  # the process: a Group, or what behaves like one
        self._lives: dict[str, int] = {}
        self._forks: forks.Forks | None = None
        self._check = nothing

    def submission(self, roles: list[RoleSpec]) -> Any:
        """What is to be submitted (`submit`, `describe`) for the plan to be started elsewhere; None: nothing."""
        return None

    def placement(self, roles: list[RoleSpec]) -> str:
        """Where the processes are to be, for people; empty: all are here."""
        return ""

    def start(self, roles: list[RoleSpec], check: Callable[[], None] = nothing) -> None:
        """`check` is called again and again where something has to be waited for, and may raise."""
        (self.run / "logs").mkdir(exist_ok=True)
        shutil.rmtree(self.run / RENDEZVOUS, ignore_errors=True)  # of a starter that was killed
        self._prepare()
        self._check = check
        for role in roles:
            self._start(role)

    def _prepare(self) -> None:
        # Paths of Unix sockets are limited to about 100 characters, so they can't live in the run folder.
        self._sockets = Path(tempfile.mkdtemp(prefix="areal-"))

    def _label(self, role: RoleSpec, lives: int) -> str:
        """The name under which the process is known."""
        return role.name

    def _pid(self, process: Any) -> int:
        """The id of the role's process."""
        return process.pid

    def _command(self, role: RoleSpec, lives: int) -> list[str]:
        """How the process is started; it has been `lives` times before."""
        command = [sys.executable, "-m", role.module, "--name", role.name, "--run", str(self.run.resolve())]
        return [*command, "--sockets", str(self._sockets), "--starter", str(os.getpid())]

    def _spawn(self, role: RoleSpec, lives: int) -> Any:
        command, log = self._command(role, lives), self.run / "logs" / f"{role.name}.log"
        python, module = [sys.executable, "-m"], command[2]
        if not (forks.AVAILABLE and role.imports_torch and command[:2] == python):
            return spawn(command, role.threads, log)
        self._forks = self._forks or forks.Forks(self.run)
        try:
            return self._forks.start(module, command[3:], role.threads, log, self._check)
        except forks.ForksGone:  # what it has forked ends with it, and is told of; this one can do without
            self._forks.close()
            self._forks = None
            return spawn(command, role.threads, log)

    def _start(self, role: RoleSpec) -> None:
        self._running[role.name] = (role, self._spawn(role, self._lives.setdefault(role.name, 0)))

    def pause(self) -> None:
        """Let the learner stop at a checkpoint; `poll` then raises RunStopped."""
        if "learner" in self._running:
            self._running["learner"][1].send_signal(signal.SIGUSR1)

    def poll(self) -> bool:
        """Restart actors that died. True once the learner has ended well. Raises RunFailed, RunStopped."""
        for role, process in list(self._running.values()):
            code = self._code(role, process)
            if code is None:
                continue
            del self._running[role.name]
            process.end(signal.SIGKILL)  # what it has started must not live on
            if role.name == "learner" and code == 0:
                return True
            if role.name == "learner" and code in (EXIT_PAUSED, EXIT_STOPPED):
                paused = code == EXIT_PAUSED
                raise RunStopped(f"{'paused' if paused else 'stopped'} at a checkpoint", paused)
            lives = self._lives[role.name]
            if role.essential or code == EXIT_USER_ERROR or lives >= self.max_restarts:
                raise RunFailed(self._obituary(role, code, lives))
            self._lives[role.name] += 1
            self.deaths.append(Death(self._label(role, lives), self._pid(process), in_words(code), lives + 1))
            self._start(role)
        return False

    def _log(self, role: RoleSpec) -> Path:
        return self.run / "logs" / f"{role.name}.log"

    def _code(self, role: RoleSpec, process: Any) -> int | None:
        """The exit code of the role's process; None while it lives."""
        return process.poll()

    def _obituary(self, role: RoleSpec, code: int, restarts: int) -> str:
        """One line where the process told its error; how it died and the end of its log where it could not."""
        path = self._log(role)
        lines = path.read_text(errors="replace").splitlines()[-5:] if path.exists() else []
        again = f" after {restarts} restart{'s' * (restarts > 1)}" if restarts else ""
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        if shutil.disk_usage(self.run).free < FULL_BYTES:
            return f"the disk of {self.run} is full; {role.name} {in_words(code)}{again} (its log: {path})"
        if errors and code > 0:
            return f"{role.name}{again}: {errors[-1]} (its log: {path})"
        return f"{role.name} {in_words(code)}{again}; its log is {path}, which ends with\n" + "\n".join(
            f"  {line}" for line in lines
        )

    @property
    def pids(self) -> dict[str, int]:
        return {name: self._pid(process) for name, (_, process) in self._running.items()}

    def stop(self) -> None:
        """End every process: a word, and SIGKILL for what is left after a moment. Leaves no socket file."""
        self._end_all()
        shutil.rmtree(self.run / RENDEZVOUS, ignore_errors=True)
        if self._sockets:
            shutil.rmtree(self._sockets, ignore_errors=True)

    def _end_all(self) -> None:
        processes = [process for _, process in self._running.values()]
        for process in processes:
            process.end(self.END_SIGNAL)
        deadline = time.monotonic() + self.END_SECONDS
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in processes:
            process.end(signal.SIGKILL)  # also what a role may have left behind in its group
            process.wait()
        self._running.clear()
        if self._forks:
            self._forks.close()
            self._forks = None


@contextlib.contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    """A process that is started here has the signal wait until it is ready for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def in_words(code: int) -> str:
    """An exit code in words."""
    if code == EXIT_TERMINATED:
        return "was told to end by SIGTERM"
    if code == EXIT_NODE_FAILED:
        return "was lost with its node"
    if code < 0 or code > 128:  # as a shell, or srun, says it
        number = -code if code < 0 else code - 128
        return f"was killed by {signal.Signals(number).name if number in set(signal.Signals) else f'signal {number}'}"
    return f"ended with exit code {code}"
