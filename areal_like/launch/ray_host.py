"""The host of one role on a Ray cluster: a Ray actor that starts the role and reports how it ended.

Ray starts a process for each host, which imports this module and nothing else of the project.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from areal_like.launch.group import ProcessGroup, spawn

HOLD_SECONDS = 30.0
"""Seconds for a host to reach the starter."""
_KEEPALIVE = {  # a machine that has vanished is noticed after three minutes
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 60,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 20,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 6,
}


def _end_with(starter: socket.socket) -> None:
    """End this process when the connection breaks; Linux then ends the role (`end_with_starter`)."""
    with contextlib.suppress(OSError):
        starter.recv(1)
    os._exit(1)


class Host:
    """Runs in a process of Ray, in the place of one role. The role ends whenever this process ends.

    Ray ends this process when the starter is gone, but not if Ray's head is gone, too. So each host also holds a silent
    connection to the starter, and ends when that breaks."""

    def __init__(self) -> None:
        self._process: ProcessGroup | None = None

    def begin(self, arguments: list[str], threads: int, log: str, starter: tuple[str, int]) -> None:
        """Start the role with these arguments for Python. `starter` is the address to hold on to. Raises OSError."""
        held = socket.create_connection(starter, HOLD_SECONDS)
        held.settimeout(None)
        for option, value in _KEEPALIVE.items():
            held.setsockopt(*option, value)
        threading.Thread(target=_end_with, args=(held,), daemon=True).start()
        command = [sys.executable, *arguments, "--starter", str(os.getpid())]
        self._process = spawn(command, threads, Path(f"{log}.{socket.gethostname()}.log"))

    def wait(self) -> int:
        """Wait for the end of the role; returns its exit code."""
        assert self._process
        return self._process.wait()

    def signal(self, number: int, whole_group: bool) -> None:
        """Send a signal to the role, or to its whole group."""
        if self._process:
            send = self._process.end if whole_group else self._process.send_signal
            send(signal.Signals(number))
