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
from areal_like.wire.stored import Stored
from buffer.events import Snapshot
from buffer.journal import Journal
from buffer.segment_file import JournalError

log = logging.getLogger(__name__)
MOST_ACKNOWLEDGEMENTS = 10_000
"""Limit of acknowledgements that wait for the disk. Further ones are discarded: their actors push again later."""


class Outbox:
    """Collects messages, each once. `flush` makes the journal (if any) write, and sends the messages whose records are
    durable. `blocked` is the reason why the journal can't be written ("": it can). Until then the outbox sends nothing,
    and no new group starts: on a full disk all peers wait, and nothing is lost."""

    def __init__(self, router: Router, journal: Journal | None):
        self.router, self.journal, self.blocked = router, journal, ""
        self.waiting: OrderedDict[Hashable, tuple[int, bytes, Message, Payloads]] = OrderedDict()

    def put(self, peer: bytes, message: Message, payloads: Payloads = ()) -> None:
        """Send the message once all records appended so far are durable."""
        part = tuple(message.ids) if isinstance(message, messages.Pushed) else getattr(message, "index", None)
        name = (peer, type(message), part)  # an equal one is a repeated message
        waits = self.waiting.pop(name, None)  # the newer one depends on more records
        if isinstance(message, messages.Pushed) and waits is None and len(self.waiting) >= MOST_ACKNOWLEDGEMENTS:
            return
        self.waiting[name] = (self.journal.appended if self.journal else 0, peer, message, payloads)

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
        while self.waiting:
            name, (rests_on, peer, message, payloads) = next(iter(self.waiting.items()))
            if rests_on > durable:
                break
            del self.waiting[name]
            self.router.send(peer, message, payloads)

    def rotate(self, snapshot: Callable[[], Snapshot], held: Sequence[Stored], late: bool) -> None:
        """Begin a new segment of the journal: see `Journal.rotate`."""
        try:
            if self.journal:
                self.journal.rotate(snapshot, held, late)
        except (OSError, JournalError) as error:
            log.error("can't write a new segment of the journal (%s): the old ones stay", error)
