"""A program that ends with this process, however that ends: Linux kills it (PR_SET_PDEATHSIG). Its own children have no
such signal: a guard in their process group kills all that remain in it when its pipe to this process breaks."""

import contextlib
import ctypes
import logging
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)
_LIBC = ctypes.CDLL(None)  # loaded before any fork
_PR_SET_PDEATHSIG = 1
GUARD = ["sh", "-c", "read _; kill -KILL 0"]
"""Kills its process group when its input ends."""
_KILL_SECONDS = 10.0


def die_with_parent() -> None:
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    """A free port of loopback for a server that binds it seconds later. It lies below the range (from 32768 on) that
    Linux gives to outgoing connections, one of which might take it meanwhile."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Child:
    """Starts `command` at once, in a process group of its own, which must not be started from a thread that ends before
    it. `environment` is added to this process's own; `output`: where it writes; None: where this process does."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
        folder: Path | None = None,
    ):
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
            preexec_fn=die_with_parent,
        )
        self._guard = subprocess.Popen(GUARD, stdin=subprocess.PIPE, process_group=self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        """End it at once, with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self._process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:  # in the middle of a call to a driver
            log.error("process %d was killed and does not end", self.pid)
        assert self._guard.stdin
        self._guard.stdin.close()
        self._guard.wait()
