"""Messages that rest on the journal: an acknowledgement or a batch goes out once what it says is durable."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from areal_like.bus import Router
from buffer.journal import Journal

log = logging.getLogger(__name__)


class Outbox:
    """In order; without a journal nothing waits. `blocked` says why the journal can't be written, if it can't be."""

    def __init__(self, router: Router, journal: Journal | None):
        self.router, self.journal = router, journal
        self.blocked = ""
        self._waiting: deque[tuple[int, tuple[bytes, str, dict[str, Any], Sequence[Any]]]] = deque()

    @property
    def busy(self) -> bool:
        """Is the disk at work? Then it is worth looking again soon."""
        return self.journal is not None and self.journal.busy

    def add(self, peer: bytes, kind: str, body: dict[str, Any], payloads: Sequence[Any] = ()) -> None:
        """To be sent once all that the journal has been told so far is durable."""
        self._waiting.append((self.journal.appended if self.journal else 0, (peer, kind, body, payloads)))

    def flush(self) -> None:
        """Let the journal write, and send what may be sent. A full disk makes everybody wait."""
        durable: float = math.inf
        if self.journal:
            try:
                durable = self.journal.advance()
            except OSError as error:
                if not self.blocked:
                    log.error(
                        "the journal can't be written (%s): nothing is acknowledged or started until it can", error
                    )
                self.blocked = str(error)
                return
        self.blocked = ""
        while self._waiting and self._waiting[0][0] <= durable:
            self.router.send(*self._waiting.popleft()[1])
