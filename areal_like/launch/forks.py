"""The starter's side of the fork server: roles start with their libraries already imported.

Each run has its own fork server, which lives as long as the starter's connection to it. If `AREAL_FORK_SERVER` names
the socket of a listening server (`listening`), the run's server is a fork of that one and imports nothing again.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from areal_like.config.placement import Devices
from areal_like.launch.fork_server import MOST_BYTES, RoleRequest
from areal_like.launch.group import environment
from areal_like.launch.sockets import PREFIXES, SocketFolder, sweep
from areal_like.places import REPOSITORY
from areal_like.run.process import EXIT_FORKS_GONE

VARIABLE = "AREAL_FORK_SERVER"
LIBRARIES = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.optimization",
    "omegaconf",
    "zmq",
    "msgspec",
)
"""Libraries that a role with a model imports: nearly all of its start time."""
START_SECONDS = 120.0
"""Long, since an import of torch from a cold disk is slow."""
CHECK_SECONDS = 0.1
CLOSE_SECONDS = 2.0
"""A server ends at once when asked to, unless it is importing."""
LISTEN_SECONDS = 10.0
"""Runs need not wait for the server of `listening`: it accepts connections before its imports."""
AVAILABLE = sys.platform == "linux" and hasattr(os, "pidfd_open")


class ForksGone(RuntimeError):
    """The fork server has ended, or does not answer."""


class Forked:
    """A role's process, a child of the fork server, with the methods that a launcher needs: see `launch.group`."""

    def __init__(self, pid: int, forks: Forks):
        self.pid, self._forks = pid, forks

    def poll(self) -> int | None:
        return self._forks.code(self.pid)

    @property
    def remark(self) -> str:
        return self._forks.end if self.poll() == EXIT_FORKS_GONE else ""

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + (START_SECONDS if timeout is None else timeout)
        while (code := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or START_SECONDS)
            self._forks.listen(min(left, CHECK_SECONDS))
        return code

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Forks:
    """The fork server of the run in the folder `run`."""

    def __init__(self, run: Path):
        self._codes: dict[int, int | None] = {}  # exit codes of forked processes; None: still alive
        self._begun = 0  # the newest one's id
        self._title = f"forks areal_like --run {run.resolve()} "
        self._log = run / "logs" / "forks.log"  # output during the imports
        self._server: subprocess.Popen[bytes] | None = None
        if (connection := _connected(os.environ.get(VARIABLE, ""))) is None:
            connection, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with there, self._log.open("ab") as output:
                self._server = _start("--connection", str(there.fileno()), output=output, keep=(there.fileno(),))
        self._connection: socket.socket | None = connection

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        threads: int,
        log: Path,
        check: Callable[[], None],
        devices: Devices | None = None,
    ) -> Forked:
        """Start a process like `python -m module arguments`; its output is appended to `log`. The first start waits for
        the imports and calls `check` meanwhile, which may raise. Raises ForksGone."""
        request: RoleRequest = {
            "module": module,
            "arguments": list(arguments),
            "imports": LIBRARIES,
            "environment": environment(threads, devices),
            "folder": os.getcwd(),
            "threads": threads,
            "log": str(log.resolve()),
            "title": self._title,
        }
        deadline = time.monotonic() + START_SECONDS
        self._begun = 0
        self._send(request)
        while not self._begun:
            check()
            self.listen(CHECK_SECONDS)
            if self._connection is None or time.monotonic() > deadline:
                raise ForksGone(f"{module}: the fork server did not start it in time")
        return Forked(self._begun, self)

    def code(self, pid: int) -> int | None:
        """The exit code of a role; None while it lives. A role ends with the server: its code is then unknown."""
        self.listen(0.0)
        if self._connection is None and self._codes[pid] is None and not _is_alive(pid):
            self._codes[pid] = EXIT_FORKS_GONE
        return self._codes[pid]

    @property
    def end(self) -> str:
        """How the server ended, as far as known."""
        code = self._server.poll() if self._server else None
        killed = "" if code is None or code >= 0 else f"by {signal.Signals(-code).name}; "
        return f"{killed}what it said: {self._log}; a system that runs out of memory kills such processes"

    def listen(self, seconds: float) -> None:
        """Handle messages of the server; wait for them up to `seconds`."""
        if self._connection is None:
            time.sleep(seconds)
            return
        while self._connection and select.select([self._connection], [], [], seconds)[0]:
            seconds = 0.0
            self._take()

    def _take(self) -> None:
        assert self._connection
        try:
            packet = self._connection.recv(MOST_BYTES)
        except ConnectionError:
            packet = b""
        if not packet:
            self._connection.close()
            self._connection = None
            return
        message = json.loads(packet)
        pid, code = message["pid"], message.get("code")
        if code is None or self._codes.get(pid, 0) is not None:  # a process may die before it can send its id
            self._begun = pid
        self._codes[pid] = code

    def _send(self, request: RoleRequest) -> None:
        try:
            if self._connection:
                self._connection.sendall(json.dumps(request).encode())
        except OSError:
            self._connection = None

    def close(self) -> None:
        """End the server and all processes that it forked."""
        if self._server:
            self._server.kill()  # it may be importing
            self._server.wait()
        if self._connection:
            self._connection.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + CLOSE_SECONDS
            while self._connection and time.monotonic() < deadline:
                self.listen(CHECK_SECONDS)
        if self._connection:
            self._connection.close()
            self._connection = None
        if self._server:
            with contextlib.suppress(OSError):
                if not self._log.stat().st_size:
                    self._log.unlink()


def _connected(path: str) -> socket.socket | None:
    """A connection to the server that listens at `path`; None if none does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"  # a zombie counts as dead: its new parent may never wait for it


def _start(*arguments: str, output: IO[bytes] | int, keep: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "areal_like.launch.fork_server", *arguments],
        cwd=REPOSITORY,
        env=environment(threads=1),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=keep,
        start_new_session=True,
    )


@contextlib.contextmanager
def listening(more: Sequence[str] = ()) -> Iterator[None]:
    """Let all runs that this process starts, in a row or in parallel, share the imports of one fork server: LIBRARIES,
    and `more` modules. Does nothing if there is one already."""
    if not AVAILABLE or VARIABLE in os.environ:
        yield
        return
    sweep()
    folder = SocketFolder(PREFIXES[1])
    path = os.environ[VARIABLE] = str(folder.path / "socket")
    server = _start("--listen", path, "--imports", ",".join([*LIBRARIES, *more]), output=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + LISTEN_SECONDS
        while not Path(path).exists() and server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        yield
    finally:
        del os.environ[VARIABLE]
        server.kill()
        server.wait()
        folder.remove()
