"""The client of the buffer for a process that starts or watches a run."""

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

from areal_like.wire import messages
from areal_like.wire.bus import Dealer
from areal_like.wire.frames import WireError
from areal_like.wire.link import BusError

LOOK_SECONDS = 0.5
"""Seconds between checks whether the buffer is still there."""


class SupervisorClient:
    """The starter's side: reads reports and reports deaths, without waiting. Raises BusError if it is not let in."""

    def __init__(self, endpoint: str, keys: str | None = None):
        # Several may look in, from several hosts, and process ids are unique on one host only.
        name = f"supervisor-{socket.gethostname()}"
        self.dealer = Dealer(endpoint, name, "buffer", keys=keys, role="operator")

    def ask(self) -> None:
        self.dealer.send(messages.Status())

    def newest_report(self) -> dict[str, Any] | None:
        report = None
        while True:
            with contextlib.suppress(WireError):
                received = self.dealer.receive(timeout=0)
                if received is None:
                    return report
                if isinstance(received.message, messages.Report):
                    report = received.message.report

    def report(self, timeout: float, *, is_there: Callable[[], bool] = lambda: True) -> dict[str, Any] | None:
        """Ask for a report; None after `timeout` seconds or without a buffer. Raises BusError for a refusal."""
        self.ask()
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0 and is_there():
            received = self.dealer.receive(timeout=min(left, LOOK_SECONDS))
            message = received and received.message
            if isinstance(message, messages.Report):
                return message.report
            if isinstance(message, messages.Refused):
                raise BusError(f"the buffer refused: {message.reason}")
        return None

    def stop(self, drain: bool) -> None:
        self.dealer.send(messages.Stop(drain))

    def lost(self, name: str, pid: int, how: str, *, for_good: bool = False, by_itself: bool = False) -> None:
        self.dealer.send(messages.Lost(name, pid, how[: messages.MAX_TEXT], for_good, by_itself))

    def close(self) -> None:
        self.dealer.close()
