"""A session between the buffer and this actor, from hello to the next hello: what each may assume.

    hello ──► welcome ──► leases, announcements ... ──► the connection broke, or the buffer gave the actor up ──► hello

When a connection breaks, messages of both directions may be lost silently. So the actor sends hello again, and earlier
agreements are void: the buffer gives the leases to others, and the actor stops work on them. It pushes finished groups
until they are acknowledged, in any session: the buffer takes the first push of each.
"""

import logging
import time

from actors.subscriber import Subscriber
from actors.worker import Worker
from areal_like.wire import messages
from areal_like.wire.actor_client import ActorClient
from areal_like.wire.frames import NOT_WITH_THIS_KEY, SAY_HELLO, Received
from areal_like.wire.link import WrongKeysError

log = logging.getLogger(__name__)
HELLO_SECONDS = 5.0
"""Seconds after which an unanswered hello is repeated when the buffer asks for it."""


class GivenUp(RuntimeError):
    """The buffer gave this actor up: it must be restarted."""


class Session:
    """Passes each message to the part that handles it."""

    def __init__(self, client: ActorClient, worker: Worker, subscriber: Subscriber):
        self.client, self.worker, self.subscriber = client, worker, subscriber
        self.welcomed = False
        self._said_at = time.monotonic()

    async def receive(self) -> None:
        while True:
            self.handle(await self.client.dealer.receive())

    async def renew_when_cut(self) -> None:
        """Handle reconnects until the process ends. Raises BusError if the buffer does not let this actor in."""
        while True:
            await self.client.dealer.link.until_reconnected()
            log.warning("the connection to the buffer broke and is there again: hello again")
            self.renew()

    def handle(self, received: Received) -> None:
        """Raises GivenUp, WrongKeysError."""
        match message := received.message:
            case messages.Lease():
                if self.welcomed:  # otherwise it is from the session before: others have it, or will
                    self.worker.start(message.leases)
            case messages.Announce():
                self.subscriber.announce(message.manifest)
            case messages.Pushed():
                self.client.acknowledged(message.ids)
            case messages.Cancel():
                self.worker.cancel(message.ids, message.hand_back)
            case messages.Quit():
                raise GivenUp(message.reason)
            case messages.Welcome():
                self.welcomed = True
            case messages.Refused():
                self._on_refused(message.reason)

    def renew(self) -> None:
        self.welcomed, self._said_at = False, time.monotonic()
        self.worker.hello_again()
        if self.worker.engine.version >= 0:
            self.client.send(messages.Applied(self.worker.engine.version, self.worker.engine.digest))

    def _on_refused(self, reason: str) -> None:
        if NOT_WITH_THIS_KEY in reason:
            raise WrongKeysError(f"the buffer refused a message: {reason}")
        log.warning("the buffer refused a message: %s", reason)
        unanswered = time.monotonic() - self._said_at > HELLO_SECONDS
        if SAY_HELLO in reason and (self.welcomed or unanswered):
            self.renew()  # once, however many messages were refused meanwhile
