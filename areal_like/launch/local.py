"""Starts a plan as processes of this machine, watches them, restarts actors, and ends all of them reliably.

Each role leads a process group of its own, so that what it has started ends with it. `poll` is called many times a
second and doesn't wait, a restart's delay included; only the first role that is forked waits for its imports (and is
interrupted by `check`), and `stop` waits for a set time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from areal_like.launch import forks
from areal_like.launch.forks import environment
from areal_like.launch.plan import RoleSpec
from areal_like.launch.restarts import CommonFault, Limits, Restarts
from areal_like.launch.sockets import SocketFolder, sweep
from areal_like.process import (
    EXIT_FORKS_GONE,
    EXIT_NO_SPACE,
    EXIT_NODE_FAILED,
    EXIT_PAUSED,
    EXIT_STOPPED,
    EXIT_TERMINATED,
    EXIT_USER_ERROR,
    REPOSITORY,
    TERM_SECONDS,
)
from areal_like.run_folder import RENDEZVOUS, has_stepped, room_wanted

TAIL_BYTES, TAIL_LINES = 1 << 14, 5
"""Bytes of a role's log in which its last words are searched."""
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Signals that come from outside: a death by them says nothing about the actor."""


class RunFailed(RuntimeError):
    """The run cannot continue. The text says which process ended, how, and its last words. `resumable`: could a resume
    help, or would the same happen again?"""

    def __init__(self, text: str, resumable: bool = True):
        super().__init__(text)
        self.resumable = resumable


class RunStopped(RuntimeError):
    """The run ended early and can be resumed; the text says how. `paused`: it resumes by itself (a signal stopped the
    learner, or its node is gone); otherwise a person stopped it."""

    def __init__(self, text: str, paused: bool):
        super().__init__(text)
        self.paused = paused


@dataclass(frozen=True, slots=True)
class Death:
    """An actor's process that died: its name, its id (0: unknown here), how it died, how often this happened, the
    seconds until its restart (None: it is left out), and its last error, if known."""

    name: str
    pid: int
    how: str
    count: int
    again_in: float | None = 0.0
    error: str = ""

    def __str__(self) -> str:
        error = f" ({self.error})" if self.error else ""
        if self.again_in is None:
            return f"{self.name} {self.how}{error}: left out, after {self.count} deaths"
        delay = f" in {self.again_in:.0f} s" if self.again_in else ""
        return f"{self.name} {self.how}{error}: started again{delay} (restart {self.count})"


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
    """`limits` says how often actors are restarted. `ready_timeout` seconds is what roles wait for one another at the
    start. `left_out` are the actors that died too often, each with its last words.

    Other launchers differ in `_spawn` or `_command`, in how a process is told to end, and in the time that it gets.
    """

    ACROSS_HOSTS = False
    """Are the processes on several hosts? Then their sockets are not this host's alone, and need keys."""
    ONE_PROCESS = False
    """Are all roles in the starter's own process?"""
    END_SIGNAL = signal.SIGTERM
    END_SECONDS = float(TERM_SECONDS)

    def __init__(self, run: Path, limits: Limits, *, ready_timeout: Annotated[float, "(0, 1e7]"] = 120.0):
        self.run, self.limits, self.ready_timeout = run, limits, ready_timeout
        self.deaths: list[Death] = []
        self.left_out: dict[str, str] = {}
        self._sockets: SocketFolder | None = None
        self._running: dict[str, tuple[RoleSpec, Any]] = {}  # the process: a Group, or what behaves like one
        self._due: dict[str, tuple[float, RoleSpec]] = {}  # actors that wait to be started again, and until when
        self._actors: list[str] = []
        self._restarts, self._fault = Restarts(limits), CommonFault()
        self._lives: dict[str, int] = {}
        self._log_begins: dict[str, int] = {}  # bytes of a role's log that are of its earlier lives
        self._forks: forks.Forks | None = None
        self._check = nothing

    def submission(self, roles: list[RoleSpec]) -> Any:
        """What must be submitted (`submit`, `describe`) to start the plan elsewhere; None: nothing."""
        return None

    def placement(self, roles: list[RoleSpec]) -> str:
        """Describes where the processes will run; empty: all here."""
        return ""

    def start(self, roles: list[RoleSpec], check: Callable[[], None] = nothing) -> None:
        """Start all roles. `check` is called repeatedly during waits, and may raise."""
        (self.run / "logs").mkdir(exist_ok=True)
        shutil.rmtree(self.run / RENDEZVOUS, ignore_errors=True)  # of a starter that was killed
        sweep()
        self._prepare()
        self._check = check
        for role in roles:
            self._start(role)

    def _prepare(self) -> None:
        # Paths of Unix sockets are limited to about 100 characters, so they can't live in the run folder.
        self._sockets = SocketFolder()

    def _label(self, role: RoleSpec, lives: int) -> str:
        """The name under which the process is known."""
        return role.name

    def _pid(self, process: Any) -> int:
        """The id of the role's process."""
        return process.pid

    def _command(self, role: RoleSpec, lives: int) -> list[str]:
        """How the process is started; it has been `lives` times before."""
        command = [sys.executable, "-m", role.module, "--name", role.name, "--run", str(self.run.resolve())]
        command += ["--sockets", str(self._sockets.path)] if self._sockets else []
        return [*command, "--starter", str(os.getpid())]

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
        if not role.essential and role.name not in self._actors:
            self._actors.append(role.name)
        log = self.run / "logs" / f"{role.name}.log"
        self._log_begins[role.name] = log.stat().st_size if log.exists() else 0
        self._running[role.name] = (role, self._spawn(role, self._lives.setdefault(role.name, 0)))

    def pause(self) -> None:
        """Let the learner stop at a checkpoint; `poll` then raises RunStopped."""
        if "learner" in self._running:
            self._running["learner"][1].send_signal(signal.SIGUSR1)

    def poll(self) -> bool:
        """Check for deaths, and restart the actors whose time has come. True once the learner has ended well. Raises
        RunFailed, RunStopped."""
        for role, process in list(self._running.values()):
            code = self._code(role, process)
            if code is None:
                continue
            del self._running[role.name]
            process.end(signal.SIGKILL)  # what it has started must not live on
            if not role.essential:
                self._actor_died(role, process, code)
            elif self._has_ended_well(role, code):
                return True
        now = time.monotonic()
        for role in [role for due, role in self._due.values() if due <= now]:
            del self._due[role.name]
            self._start(role)
        return False

    def _has_ended_well(self, role: RoleSpec, code: int) -> bool:
        """Of an essential role. Raises RunFailed, RunStopped."""
        if has_ended_well(role.name, code):
            return True
        raise RunFailed(self._obituary(role, code), may_resume(self.run, code))

    def _actor_died(self, role: RoleSpec, process: Any, code: int) -> None:
        """Restart an actor, now or later, or leave it out. Raises RunFailed."""
        lives = self._lives[role.name]
        self._lives[role.name] += 1
        delay = None if code == EXIT_USER_ERROR else self._restarts.delay(role.name)
        label, words = self._label(role, lives), self._obituary(role, code)
        error = self._error(self._tail(role))
        self.deaths.append(Death(label, self._pid(process), in_words(code), lives + 1, delay, error))
        if delay is None:
            self.left_out[role.name] = words
        else:
            self._due[role.name] = (time.monotonic() + delay, role)
        self._judge(role, code, words)

    def _judge(self, role: RoleSpec, code: int, words: str) -> None:
        """May the run continue after the death of an actor? Raises RunFailed."""
        if code == EXIT_USER_ERROR:
            raise RunFailed(words, resumable=False)
        cause = "" if _is_from_outside(code) else self._error(self._tail(role)) or in_words(code)
        if self._fault.strikes_all(role.name, cause, self._actors) and not has_stepped(self.run):
            many = f"all {len(self._actors)} actors fail alike" if len(self._actors) > 1 else "it fails again and again"
            raise RunFailed(f"{words}; {many}, before the first train step", resumable=False)
        left = len(self._actors) - len(self.left_out)
        if left < self.limits.min_alive:
            few = f"; {left} of {len(self._actors)} actors are left (actors.min_alive={self.limits.min_alive})"
            raise RunFailed(words + few * (len(self._actors) > 1), may_resume(self.run, code))

    def _log(self, role: RoleSpec) -> Path:
        return self.run / "logs" / f"{role.name}.log"

    def _code(self, role: RoleSpec, process: Any) -> int | None:
        """The exit code of the role's process; None while it lives."""
        return process.poll()

    def _tail(self, role: RoleSpec) -> list[str]:
        """The last lines that a role logged in its last life."""
        path = self._log(role)
        if not path.exists():
            return []
        begin = self._log_begins.get(role.name, 0) if path.name == f"{role.name}.log" else 0
        with path.open("rb") as file:
            file.seek(max(begin, path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]

    def _error(self, lines: list[str]) -> str:
        """The error that a role reported; empty if it could not."""
        return next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), "")

    def _obituary(self, role: RoleSpec, code: int) -> str:
        """One line if the process reported its error; otherwise how it died, and the end of its log."""
        if not self.run.is_dir():
            return f"the run folder {self.run} is gone: was it removed? ({role.name} {in_words(code)})"
        path, restarts = self._log(role), max(0, self._lives[role.name] - (not role.essential))
        again = f" after {restarts} restart{'s' * (restarts > 1)}" if restarts else ""
        lines = self._tail(role)
        error = self._error(lines)
        if code == EXIT_NO_SPACE:
            error = error or "No space left on device"
            return f"{role.name}{again}: {error}: {room_wanted(self.run)}"
        if error and code > 0:
            return f"{role.name}{again}: {error} (its log: {path})"
        more = f" ({self._forks.end})" if code == EXIT_FORKS_GONE and self._forks else ""
        last = "which ends with\n" + "\n".join(f"  {line}" for line in lines) if lines else "which says nothing of it"
        return f"{role.name} {in_words(code)}{again}{more}; its log is {path}, {last}"

    @property
    def pids(self) -> dict[str, int]:
        return {name: self._pid(process) for name, (_, process) in self._running.items()}

    def stop(self) -> None:
        """End every process: SIGTERM, then SIGKILL for what is left after a moment. Leaves no socket file."""
        self._end_all()
        shutil.rmtree(self.run / RENDEZVOUS, ignore_errors=True)
        if self._sockets:
            self._sockets.remove()

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
        self._due.clear()
        if self._forks:
            self._forks.close()
            self._forks = None


@contextlib.contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    """Block the signal in a process started here, until it is ready for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def has_ended_well(name: str, code: int) -> bool:
    """Is the run finished, now that this role has ended? Raises RunStopped."""
    if name == "learner" and code in (EXIT_PAUSED, EXIT_STOPPED):
        paused = code == EXIT_PAUSED
        raise RunStopped(f"{'paused' if paused else 'stopped'} at a checkpoint", paused)
    return name == "learner" and code == 0


def may_resume(run: Path, code: int) -> bool:
    """An error before the first train step would happen again."""
    own_error = 0 < code < 128 and code != EXIT_NO_SPACE
    return code != EXIT_USER_ERROR and (not own_error or has_stepped(run))


def in_words(code: int) -> str:
    """An exit code in words."""
    if code == EXIT_TERMINATED:
        return "was told to end by SIGTERM"
    if code == EXIT_NODE_FAILED:
        return "was lost with its node"
    if code == EXIT_FORKS_GONE:
        return "ended with the fork server, which was killed or has died"
    if number := _signal_of(code):
        return f"was killed by {signal.Signals(number).name if number in set(signal.Signals) else f'signal {number}'}"
    return f"ended with exit code {code}"


def _signal_of(code: int) -> int:
    """The number of the signal that ended a process, as subprocess, a shell or srun reports it; 0: none."""
    return -code if code < 0 else code - 128 if 128 < code < EXIT_FORKS_GONE else 0


def _is_from_outside(code: int) -> bool:
    """Did something outside kill the actor?"""
    return code in (EXIT_NODE_FAILED, EXIT_FORKS_GONE, EXIT_NO_SPACE) or _signal_of(code) in _FROM_OUTSIDE
