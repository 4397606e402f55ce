"""The host of one role on a Ray cluster, in a process of Ray that imports this module and `group` of the project."""

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
_KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 20, socket.TCP_KEEPCNT: 6}
"""A machine that has vanished is noticed after three minutes."""


class Host:
    """Runs in a process of Ray, in the place of one role. The role ends whenever this process ends.

    Ray ends this process when the starter is gone, but not if Ray's head is gone, too. So each host also holds a silent
    connection to the starter, and ends when that breaks; Linux then ends the role (`end_with_starter`)."""

    def __init__(self) -> None:
        self._process: ProcessGroup | None = None

    def begin(self, arguments: list[str], threads: int, log: str, starter: tuple[str, int]) -> None:
        """Start the role with these arguments for Python. `starter` is the address to hold on to. Raises OSError."""
        held = socket.create_connection(starter, HOLD_SECONDS)
        held.settimeout(None)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            held.setsockopt(socket.IPPROTO_TCP, option, value)

        def end_with_starter() -> None:
            with contextlib.suppress(OSError):
                held.recv(1)
            os._exit(1)

        threading.Thread(target=end_with_starter, daemon=True).start()
        command = [sys.executable, *arguments, "--starter", str(os.getpid())]
        self._process = spawn(command, threads, Path(f"{log}.{socket.gethostname()}.log"))

    def wait(self) -> int:
        assert self._process
        return self._process.wait()

    def signal(self, number: int, whole_group: bool) -> None:
        if self._process:
            send = self._process.end if whole_group else self._process.send_signal
            send(signal.Signals(number))
