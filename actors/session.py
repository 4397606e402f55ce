"""What the buffer and this actor may assume of one another: a session, from hello to the next hello.

    hello ──► welcome ──► leases, announcements ... ──► the connection broke, or the buffer gave the actor up ──► hello

When a connection breaks, messages of both directions may be lost without a word. Nobody tries to find out which: the
actor says hello again, and all that was agreed on before is void. The buffer gives the leases to others (it cannot know
which of them arrived, or whether their end was told); the actor stops working on them. Groups that were finished are
kept and pushed until they are acknowledged, whatever the session: the buffer takes the first push of each.
"""

from __future__ import annotations

import logging
import time

from actors.subscriber import Subscriber
from actors.worker import Worker
from areal_like.client import ActorClient
from areal_like.link import WrongKeysError
from areal_like.wire import NOT_WITH_THIS_KEY, SAY_HELLO, Message

log = logging.getLogger(__name__)
HELLO_SECONDS = 5.0
"""Seconds after which an unanswered hello is repeated when the buffer asks for it."""


class Stuck(RuntimeError):
    """The buffer gave this actor up: it must be restarted."""


class Session:
    """Passes each message to the part that handles it."""

    def __init__(self, client: ActorClient, worker: Worker, subscriber: Subscriber):
        self.client, self.worker, self.subscriber = client, worker, subscriber
        self.welcomed = False
        self._said_at = time.monotonic()
        self._handlers = {
            "lease": self._on_lease,
            "announce": lambda message: subscriber.announce(message.body["manifest"]),
            "pushed": lambda message: client.acknowledged(message.body["ids"]),
            "cancel": lambda message: worker.cancel(message.body["ids"], message.body["give_back"]),
            "quit": self._on_quit,
            "welcome": self._on_welcome,
            "refused": self._on_refused,
        }

    async def receive(self) -> None:
        """Handle the buffer's messages until the process ends."""
        while True:
            self.handle(await self.client.receive())

    async def renew_when_cut(self) -> None:
        """Handle reconnects until the process ends. Raises BusError if the buffer does not let this actor in."""
        while True:
            await self.client.dealer.link.until_reconnected()
            log.warning("the connection to the buffer broke and is there again: hello again")
            self.renew()

    def handle(self, message: Message) -> None:
        self._handlers[message.kind](message)

    def renew(self) -> None:
        """Start a new session."""
        self.welcomed, self._said_at = False, time.monotonic()
        self.worker.hello_again()
        if self.worker.engine.version >= 0:
            self.client.applied(self.worker.engine.version, self.worker.engine.digest)

    def _on_lease(self, message: Message) -> None:
        if self.welcomed:  # else it is of the session before: others have it, or will
            self.worker.start(self.client.leases(message), self.client.carried(message))

    def _on_welcome(self, message: Message) -> None:
        self.welcomed = True

    def _on_quit(self, message: Message) -> None:
        """Raises Stuck."""
        raise Stuck(message.body["reason"])

    def _on_refused(self, message: Message) -> None:
        """Raises WrongKeysError where this actor's key is not one of actors."""
        if NOT_WITH_THIS_KEY in message.body["reason"]:
            raise WrongKeysError(f"the buffer refused a message: {message.body['reason']}")
        log.warning("the buffer refused a message: %s", message.body["reason"])
        unanswered = time.monotonic() - self._said_at > HELLO_SECONDS
        if SAY_HELLO in message.body["reason"] and (self.welcomed or unanswered):
            self.renew()  # once, however many messages were refused meanwhile
