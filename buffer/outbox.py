"""Messages that may only be said once what they rest on is in the journal: acknowledgements and batches."""

from __future__ import annotations

import logging
from typing import Any

from areal_like.bus import Router
from buffer.journal import Journal

log = logging.getLogger(__name__)


class Outbox:
    """Collects messages; `flush` commits the journal (if there is one), then sends them.

    `blocked` says, in words, why the journal can't be written; while it does, nothing is sent and nobody should start
    anything. A full disk so makes everybody wait, and nothing is lost.
    """

    def __init__(self, router: Router, journal: Journal | None):
        self.router, self.journal, self.blocked = router, journal, ""
        self._messages: list[tuple[bytes, str, dict[str, Any], Any]] = []

    def put(self, peer: bytes, kind: str, body: dict[str, Any], payload: Any = None) -> None:
        self._messages.append((peer, kind, body, payload))

    def flush(self) -> None:
        try:
            if self.journal:
                self.journal.commit()
        except OSError as error:
            if not self.blocked:
                log.error("the journal can't be written (%s): nothing is acknowledged or started until it can", error)
            self.blocked = str(error)
            return
        self.blocked = ""
        for message in self._messages:
            self.router.send(*message)
        self._messages.clear()

    def rotate(self, snapshot: tuple[list[Any], bytes]) -> None:
        """Begin a new segment of the journal with a snapshot."""
        try:
            if self.journal:
                self.journal.rotate(*snapshot)
        except OSError as error:
            log.error("the journal's new segment can't be written (%s): the old ones stay", error)
