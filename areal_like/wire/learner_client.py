"""The client of the buffer for the learner."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from areal_like.types import Batch
from areal_like.wire import messages
from areal_like.wire.bus import Dealer
from areal_like.wire.frames import ONLY_THE_LEARNER, Payloads, Received
from areal_like.wire.groups import decode_group, unpack_heads
from areal_like.wire.link import BusError
from areal_like.wire.messages import Message

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.5
"""Seconds between checks whether the connection was made again."""
TELL_SECONDS = 10.0
M = TypeVar("M", bound=Message)


class Stopped(Exception):
    """Raised in place of a batch: the learner shall end. `drained`: everything admitted is trained, or (`late`) the
    run's time is over: the run is done. `by_signal`: this process got a signal; resume later. Otherwise a person asked
    the run to stop."""

    def __init__(self, drained: bool = False, by_signal: bool = False, late: bool = False):
        super().__init__("drained" if drained else "asked to stop")
        self.drained, self.by_signal, self.late = drained, by_signal, late


class LearnerClient:
    """The learner's side: blocking, one batch asked for ahead.

    After a reconnect the learner repeats messages that the buffer may have missed; the buffer accepts these twice, and
    the learner takes a batch once. With several ranks each has a client; most only ask for shares."""

    def __init__(
        self, endpoint: str, name: str = "learner", *, link_timeout: float | None = None, keys: str | None = None
    ):
        self.dealer = Dealer(endpoint, name, "buffer", link_timeout=link_timeout, keys=keys, role="learner")
        self.name = name
        self.pausing = self.stopping = False
        self._received = deque[Received]()  # in the middle of a train step
        self._order = threading.Lock()
        self._index, self.redo = -1, 0
        self._last_sent: dict[type[Message], Message] = {}  # the newest of each, in order, to send them again

    def send(self, message: Message) -> None:
        """Send a message; after a reconnect the newest of each kind is sent again. Any thread may call this."""
        with self._order:
            self._last_sent.pop(type(message), None)
            self._last_sent[type(message)] = message
            self.dealer.send(message)

    def hello(self, model: messages.Model | None = None) -> None:
        self.send(messages.Hello("learner", self.name, os.getpid(), 0))
        if model:
            self.send(model)

    def published(self, manifest: messages.Manifest) -> None:
        self.send(messages.Published(manifest))

    def trained(self, index: int) -> None:
        self.send(messages.Trained(index))

    def checkpointed(self, step: int) -> None:
        self.dealer.send(messages.Checkpointed(step))

    def want(self, index: int, version: int, until: float | None = None) -> None:
        self._index = index
        self.send(messages.Want(index, version, until))

    def want_share(self, index: int, rank: int) -> None:
        self._index = index
        self.send(messages.WantShare(index, rank))

    def pause(self) -> None:
        """Make `batch` raise Stopped instead of waiting longer. For signal handlers."""
        self.pausing = True

    def stops(self) -> None:
        """The learner stops at a checkpoint."""
        self.dealer.send(messages.Stop(drain=False))

    def shall_stop(self) -> bool:
        """Was the run asked to end at once? Does not wait: for the middle of a train step."""
        while received := self.dealer.receive(0):
            if received.message == messages.Stop(drain=False):
                self.stopping = True  # the buffer repeats it when the next batch is due
            else:
                self._received.append(received)
        return self.pausing or self.stopping

    def batch(self, may_pause: bool = True) -> tuple[Batch, dict[str, Any]]:
        """The requested batch (or share), and the buffer's report with it. Waits, and logs that now and then.
        Raises Stopped; without `may_pause` only when everything is drained."""
        index = self._index
        wanted = lambda found: found.index == index and found.redo == self.redo  # noqa: E731 - no batch set aside
        found, payloads = self._wait_for(messages.Batch, f"batch {index}", wanted, may_pause)
        groups = [decode_group(*pair) for pair in zip(unpack_heads(found.table), payloads, strict=True)]
        for group, actor in zip(groups, found.actors, strict=True):
            group.actor = actor
        batch = Batch(found.index, found.version, groups, found.oldest_allowed, found.places, found.redo)
        if batch.oldest_allowed > 0:
            for sample in batch.samples:
                sample.mask_tokens_before(batch.oldest_allowed)
        return batch, found.info

    def set_aside(self, index: int, reason: str) -> None:
        """Report that this batch cannot be trained. Returns when the buffer has set it aside; ask for it again then."""
        self._last_sent.pop(messages.Want, None)
        self.send(messages.Untrainable(index, reason[: messages.MAX_TEXT]))
        answer, _ = self._wait_for(messages.SetAside, "its answer", lambda answer: answer.index == index)
        self.redo = answer.redo
        self._last_sent.pop(messages.Untrainable, None)

    def finish(self, reason: str, steps: int) -> dict[str, Any]:
        """End the run after `steps` trained batches: the last evaluation is made; returns the buffer's final report."""
        self._last_sent.pop(messages.Want, None)
        self.send(messages.EndRun(reason[: messages.MAX_TEXT], steps))
        return self._wait_for(messages.Report, "the last evaluation", lambda report: True)[0].report

    def _wait_for(
        self, kind: type[M], what: str, is_it: Callable[[M], bool], may_pause: bool = False
    ) -> tuple[M, Payloads]:
        """The next such message. Raises Stopped, BusError."""
        begin = logged = time.monotonic()
        while True:
            if self.pausing and may_pause:
                raise Stopped(by_signal=True)
            received = self._received.popleft() if self._received else self.dealer.receive(timeout=LOOK_SECONDS)
            now = time.monotonic()
            if self.dealer.link.reconnected():
                log.warning("the connection to the buffer broke and is there again")
                self._resend_all()
            if received is None:
                if now - logged >= TELL_SECONDS:
                    logged = now
                    log.warning("waiting for %s from the buffer for %.0f s", what, now - begin)
                continue
            message = received.message
            if isinstance(message, kind) and is_it(message):
                return message, received.payloads
            at_once = isinstance(message, messages.Stop) and not message.drain
            if isinstance(message, messages.Stop) and messages.Want in self._last_sent and (may_pause or not at_once):
                raise Stopped(drained=message.drain, late=message.late)
            if isinstance(message, messages.Refused):
                if ONLY_THE_LEARNER not in message.reason:
                    raise BusError(f"the buffer refused a message: {message.reason}")
                self._resend_all()  # the first hello was lost

    def _resend_all(self) -> None:
        with self._order:
            for message in self._last_sent.values():
                self.dealer.send(message)

    def close(self) -> None:
        self.dealer.close()
