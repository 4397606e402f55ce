"""Starts a plan as processes of this machine, watches them, restarts actors, and ends them all for certain."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from areal_like.launch.plan import RoleSpec
from areal_like.process import EXIT_USER_ERROR

log = logging.getLogger(__name__)
REPOSITORY = Path(__file__).resolve().parent.parent.parent
TERM_SECONDS = 2.5


class RunFailed(RuntimeError):
    """A process without which the run can't go on has ended; the text says which, how, and its last words."""


class LocalLauncher:
    """`max_restarts` per actor. `ready_timeout` seconds is what roles wait for one another at the start."""

    def __init__(self, run: Path, max_restarts: int, *, ready_timeout: float = 120.0):
        self.run, self.max_restarts, self.ready_timeout = run, max_restarts, ready_timeout
        # Paths of Unix sockets are limited to about 100 characters, so they can't live in the run folder.
        self.sockets = Path(tempfile.mkdtemp(prefix="areal-"))
        self.restarts: dict[str, int] = {}
        self._running: dict[str, tuple[RoleSpec, subprocess.Popen]] = {}

    def start(self, roles: list[RoleSpec]) -> None:
        (self.run / "logs").mkdir(exist_ok=True)
        for role in roles:
            self._start(role)

    def _start(self, role: RoleSpec) -> None:
        command = [sys.executable, "-m", role.module, "--name", role.name]
        command += ["--run", str(self.run.resolve()), "--sockets", str(self.sockets)]
        threads = str(role.threads)
        environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
        with (self.run / "logs" / f"{role.name}.log").open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in the terminal reaches the starter only, which ends the others in order
            )
        self._running[role.name] = (role, process)

    def poll(self) -> bool:
        """Restart actors that died. True once the learner has ended well. Raises RunFailed."""
        for role, process in list(self._running.values()):
            code = process.poll()
            if code is None:
                continue
            if role.name == "learner" and code == 0:
                return True
            del self._running[role.name]
            restarts = self.restarts.get(role.name, 0)
            if role.essential or code == EXIT_USER_ERROR or restarts >= self.max_restarts:
                raise RunFailed(self._obituary(role, code, restarts))
            self.restarts[role.name] = restarts + 1
            log.warning("%s %s: started again (%d of %d)", role.name, _how(code), restarts + 1, self.max_restarts)
            self._start(role)
        return False

    def _obituary(self, role: RoleSpec, code: int, restarts: int) -> str:
        path = self.run / "logs" / f"{role.name}.log"
        lines = path.read_text(errors="replace").splitlines()
        error = [line for line in lines[-5:] if line.startswith("error: ")]
        last = error[-1:] or lines[-12:]
        again = f" (after {restarts} restarts)" if restarts else ""
        return f"{role.name} {_how(code)}{again}; its log is {path}:\n" + "\n".join(f"  {line}" for line in last)

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, (_, process) in self._running.items()}

    def stop(self) -> None:
        """End every process: SIGTERM, and SIGKILL for what is left after a moment. Leaves no socket file."""
        processes = [process for _, process in self._running.values()]
        for process in processes:
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + TERM_SECONDS
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
        for process in processes:
            _signal_group(process, signal.SIGKILL)  # also what a role may have left behind in its session
            process.wait()
        self._running.clear()
        shutil.rmtree(self.sockets, ignore_errors=True)


def _signal_group(process: subprocess.Popen, number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def _how(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
