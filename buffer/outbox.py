"""Messages that may only be said once what they rest on is in the journal: acknowledgements and batches."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from areal_like import messages
from areal_like.bus import Router
from areal_like.messages import Message
from areal_like.wire import Payloads
from buffer.events import Snapshot
from buffer.journal import Journal
from buffer.payloads import JournalError, Stored

log = logging.getLogger(__name__)
COMMIT_POLL_SECONDS = 0.001
"""How often to look whether the disk has taken a commit, if no message comes."""
MOST_ACKNOWLEDGEMENTS = 10_000
"""That wait for the disk. One more is not kept: whoever gets none pushes again, and is answered then."""


class Outbox:
    """Collects messages; `flush` has the journal (if there is one) write, and sends those whose records are durable.

    `blocked` says, in words, why the journal can't be written; while it does, nothing is sent and nobody should start
    anything. A full disk so makes everybody wait, and nothing is lost. Meanwhile peers say again what got no answer: a
    message waits once, however often it is put.
    """

    def __init__(self, router: Router, journal: Journal | None):
        self.router, self.journal, self.blocked = router, journal, ""
        self._messages: OrderedDict[Hashable, tuple[int, bytes, Message, Payloads]] = OrderedDict()

    def __len__(self) -> int:
        """Messages that wait."""
        return len(self._messages)

    def patience(self, timeout: float) -> float:
        """How long to wait for messages, at most `timeout`: while the disk is at work, it is worth flushing soon."""
        return min(timeout, COMMIT_POLL_SECONDS) if self.journal and self.journal.busy else timeout

    def put(self, peer: bytes, message: Message, payloads: Payloads = ()) -> None:
        """To be sent once all that the journal has been told so far is durable."""
        name = (peer, type(message), _told_apart_by(message))
        waits = self._messages.pop(name, None)  # the newer one rests on more
        if isinstance(message, messages.Pushed) and waits is None and len(self._messages) >= MOST_ACKNOWLEDGEMENTS:
            return
        self._messages[name] = (self.journal.appended if self.journal else 0, peer, message, payloads)

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
            log.error("the journal's new segment can't be written (%s): the old ones stay", error)


def _told_apart_by(message: Message) -> Hashable:
    """What two messages of one kind differ in, if they are not the same one said twice."""
    match message:
        case messages.Pushed():
            return tuple(message.ids)
        case messages.Part():
            return message.index, message.begin
        case messages.Batch() | messages.SetAside():
            return message.index
    return None
