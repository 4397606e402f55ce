"""Signals that end a command: recorded, and raised where the command can take them."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupted(Exception):
    """The user or the system asked the run to end."""


class Signals:
    """Records the signal that asked the run to end, and SIGUSR1, which asks for a checkpoint first. It raises nothing,
    so it can't interrupt a start or a clean-up. `end` restores the earlier handlers, as the process may continue."""

    def __init__(self) -> None:
        self.received = ""
        self._pause = False
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return  # signals are the main thread's
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup asks to ignore it
                self._before[number] = signal.signal(number, self._record)

    def _record(self, number: int, frame: Any) -> None:
        if number == signal.SIGUSR1:
            self._pause = True
        else:
            self.received = self.received or signal.Signals(number).name

    def end(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take_pause(self) -> bool:
        """Has a signal asked for a pause since the last call?"""
        asked, self._pause = self._pause, False
        return asked

    def check(self) -> None:
        """Raises Interrupted."""
        if self.received:
            raise Interrupted(self.received)
