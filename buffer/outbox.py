"""Messages that wait until the journal holds the records that they depend on: acknowledgements and batches."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from areal_like.wire import messages
from areal_like.wire.bus import Router
from areal_like.wire.frames import Payloads
from areal_like.wire.messages import Message
from buffer.events import Snapshot
from buffer.journal import Journal
from buffer.segment_file import JournalError, Stored

log = logging.getLogger(__name__)
COMMIT_POLL_SECONDS = 0.001
"""How often to check whether a commit is on disk, if no message comes."""
MOST_ACKNOWLEDGEMENTS = 10_000
"""Limit of acknowledgements that wait for the disk. Further ones are discarded: their actors push again later."""


class Outbox:
    """Collects messages, each once. `flush` makes the journal (if any) write, and sends the messages whose records are
    durable. `blocked` is the reason why the journal can't be written ("": it can). Until then the outbox sends nothing,
    and no new group starts: on a full disk all peers wait, and nothing is lost."""

    def __init__(self, router: Router, journal: Journal | None):
        self.router, self.journal, self.blocked = router, journal, ""
        self._messages: OrderedDict[Hashable, tuple[int, bytes, Message, Payloads]] = OrderedDict()

    def __len__(self) -> int:
        """Messages that wait."""
        return len(self._messages)

    def patience(self, timeout: float) -> float:
        """Seconds to wait for messages: `timeout`, or less while the disk is at work, so that `flush` comes soon."""
        return min(timeout, COMMIT_POLL_SECONDS) if self.journal and self.journal.busy else timeout

    def put(self, peer: bytes, message: Message, payloads: Payloads = ()) -> None:
        """Send the message once all records appended so far are durable."""
        name = (peer, type(message), _told_apart_by(message))
        waits = self._messages.pop(name, None)  # the newer one depends on more records
        if isinstance(message, messages.Pushed) and waits is None and len(self._messages) >= MOST_ACKNOWLEDGEMENTS:
            return
        self._messages[name] = (self.journal.appended if self.journal else 0, peer, message, payloads)

    def flush(self) -> None:
        durable: float = math.inf
        try:
            if self.journal:
                before, durable = self.journal.committed, self.journal.advance()
                if self.blocked and self.journal.busy and durable == before:
                    return  # a new attempt is under way
        except OSError as error:
            if not self.blocked:
                log.error("can't write the journal (%s): nothing is acknowledged or started until this works", error)
            self.blocked = str(error)
            return
        self.blocked = ""
        while self._messages:
            name, (rests_on, peer, message, payloads) = next(iter(self._messages.items()))
            if rests_on > durable:
                break
            del self._messages[name]
            self.router.send(peer, message, payloads)

    def rotate(self, snapshot: Callable[[], Snapshot], held: Sequence[Stored]) -> None:
        """Begin a new segment of the journal: see `Journal.rotate`."""
        try:
            if self.journal:
                self.journal.rotate(snapshot, held)
        except (OSError, JournalError) as error:
            log.error("can't write a new segment of the journal (%s): the old ones stay", error)


def _told_apart_by(message: Message) -> Hashable:
    """The fields that separate two messages of one kind; equal fields mean a repeated message."""
    match message:
        case messages.Pushed():
            return tuple(message.ids)
        case messages.Batch() | messages.SetAside():
            return message.index
    return None
