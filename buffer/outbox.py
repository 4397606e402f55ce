"""Messages that may only be said once what they rest on is in the journal: acknowledgements and batches."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from areal_like.bus import Router
from buffer.journal import Journal, JournalError
from buffer.payloads import Stored

log = logging.getLogger(__name__)
COMMIT_POLL_SECONDS = 0.001
"""How often to look whether the disk has taken a commit, if no message comes."""


class Outbox:
    """Collects messages; `flush` has the journal (if there is one) write, and sends those whose records are durable.

    `blocked` says, in words, why the journal can't be written; while it does, nothing is sent and nobody should start
    anything. A full disk so makes everybody wait, and nothing is lost.
    """

    def __init__(self, router: Router, journal: Journal | None):
        self.router, self.journal, self.blocked = router, journal, ""
        self._messages: deque[tuple[int, tuple[bytes, str, dict[str, Any], Sequence[Any]]]] = deque()

    def patience(self, timeout: float) -> float:
        """How long to wait for messages, at most `timeout`: while the disk is at work, it is worth flushing soon."""
        return min(timeout, COMMIT_POLL_SECONDS) if self.journal and self.journal.busy else timeout

    def put(self, peer: bytes, kind: str, body: dict[str, Any], payloads: Sequence[Any] = ()) -> None:
        """To be sent once all that the journal has been told so far is durable."""
        self._messages.append((self.journal.appended if self.journal else 0, (peer, kind, body, payloads)))

    def flush(self) -> None:
        durable: float = math.inf
        try:
            if self.journal:
                before, durable = self.journal.committed, self.journal.advance()
                if self.blocked and self.journal.busy and durable == before:
                    return  # it is being tried again
        except OSError as error:
            if not self.blocked:
                log.error("the journal can't be written (%s): nothing is acknowledged or started until it can", error)
            self.blocked = str(error)
            return
        self.blocked = ""
        while self._messages and self._messages[0][0] <= durable:
            self.router.send(*self._messages.popleft()[1])

    def rotate(self, snapshot: Callable[[], list[Any]], held: Sequence[Stored]) -> None:
        """Begin a new segment of the journal: see `Journal.rotate`."""
        try:
            if self.journal:
                self.journal.rotate(snapshot, held)
        except (OSError, JournalError) as error:
            log.error("the journal's new segment can't be written (%s): the old ones stay", error)
