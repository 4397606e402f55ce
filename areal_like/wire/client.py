"""Clients of the buffer for actors, the learner and the starter: thin classes over the bus."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from areal_like.models.experts import Routing
from areal_like.partial import CarriedSamples
from areal_like.types import Batch, Group
from areal_like.wire import messages
from areal_like.wire.bus import AsyncDealer, Dealer
from areal_like.wire.frames import ONLY_THE_LEARNER, Frame, Payloads, WireError
from areal_like.wire.groups import Head, decode_group, decode_partial, encode_group, pack_heads, unpack_heads
from areal_like.wire.link import BusError
from areal_like.wire.messages import Message, PartialHead

log = logging.getLogger(__name__)
RETRY_SECONDS = 5.0
MAX_GROUPS_PER_PUSH = 64
LOOK_SECONDS = 0.5
"""Seconds between checks whether the connection was made again, or whether the buffer is still there."""
TELL_SECONDS = 10.0
M = TypeVar("M", bound=Message)


class Stopped(Exception):
    """Raised in place of a batch: the learner shall end. `drained`: everything admitted is trained, the run is done.
    `by_signal`: this process got a signal; resume later. Otherwise a person asked the run to stop."""

    def __init__(self, drained: bool = False, by_signal: bool = False):
        super().__init__("drained" if drained else "asked to stop")
        self.drained, self.by_signal = drained, by_signal


class ActorClient:
    """An actor's side; `slots` is the number of sequences that its engine decodes at once. A pushed group is kept, and
    sent again, until the buffer has acknowledged it; groups pushed in the same turn of the event loop share a
    message."""

    def __init__(
        self, endpoint: str, name: str, slots: int, *, link_timeout: float | None = None, keys: str | None = None
    ):
        self.name, self.slots = name, slots
        self.dealer = AsyncDealer(endpoint, name, "buffer", link_timeout=link_timeout, keys=keys, role="actor")
        self._ready: dict[int, None] = {}  # groups to push, in order
        self._unacknowledged: dict[int, tuple[float, Head, Frame]] = {}  # when each was sent, in seconds
        self.relay: messages.Relay | None = None

    def send(self, message: Message) -> None:
        """The buffer discards it at the actor's next `Hello`."""
        self.dealer.send(message)

    def hello(self) -> None:
        self.dealer.send(messages.Hello("actor", self.name, os.getpid(), self.slots))
        if self.relay:
            self.dealer.send(self.relay)

    def heartbeat(self, stats: dict[str, float | str], progress: dict[int, int], heldout: dict[int, int]) -> None:
        """Send a `Heartbeat`, and repeat pushes that got no answer."""
        self.dealer.send(messages.Heartbeat(stats, progress, heldout))
        now = time.monotonic()
        for group_id, (sent, head, payload) in list(self._unacknowledged.items()):
            if now - sent > RETRY_SECONDS:
                log.warning("group %d: no acknowledgement for %.0f s, pushing it again", group_id, now - sent)
                self._push_soon(head, payload)

    def push(self, group: Group) -> None:
        self._push_soon(*encode_group(group))

    def _push_soon(self, head: Head, payload: Frame) -> None:
        if not self._ready:
            asyncio.get_running_loop().call_soon(self._push_ready)
        self._unacknowledged[head.id] = time.monotonic(), head, payload
        self._ready[head.id] = None

    def _push_ready(self) -> None:
        found = [self._unacknowledged[each] for each in self._ready if each in self._unacknowledged]
        self._ready.clear()
        for start in range(0, len(found), MAX_GROUPS_PER_PUSH):
            some = found[start : start + MAX_GROUPS_PER_PUSH]
            self.dealer.send(messages.Push(pack_heads([head for _, head, _ in some])), [data for *_, data in some])

    def acknowledged(self, ids: Iterable[int]) -> None:
        for group_id in ids:
            self._unacknowledged.pop(group_id, None)

    def hand_back(self, ids: Iterable[int], partials: Iterable[tuple[PartialHead, Frame]], leaving: bool) -> None:
        """Return leases unfinished; `partials` hold the tokens sampled for some of them (`encode_partial`)."""
        left, found = list(ids), {head.id: (head, payload) for head, payload in partials}
        while True:
            some, left = left[:MAX_GROUPS_PER_PUSH], left[MAX_GROUPS_PER_PUSH:]
            pairs = [found[group_id] for group_id in some if group_id in found]
            message = messages.HandBack(some, [head for head, _ in pairs], leaving and not left)
            self.dealer.send(message, [payload for _, payload in pairs])
            if not left:
                return

    def evaluated(self, lease_id: int, version: int, answer: Group | None) -> None:
        """The result of a held-out lease: a group of one sample. None: it has failed, at `version`, and earns 0."""
        if answer is None:
            self.dealer.send(messages.Evaluated(lease_id, 0.0, version, version, 0, None))
            return
        (sample,), (head, payload) = answer.samples, encode_group(answer)
        facts = float(sample.reward), sample.oldest_version, sample.newest_version, sample.response_length
        self.dealer.send(messages.Evaluated(lease_id, *facts, pack_heads([head])), [payload])

    @staticmethod
    def carried(lease: messages.Lease, payloads: Payloads) -> dict[int, CarriedSamples]:
        """Partial samples in the leases of a message, by group."""
        pairs = zip(lease.partials, payloads, strict=True)
        return {head.id: decode_partial(head, payload, usable) for (head, usable), payload in pairs}

    def close(self) -> None:
        self._push_ready()
        self.dealer.close()


class LearnerClient:
    """The learner's side: blocking, one batch asked for ahead.

    After a reconnect the learner repeats messages that the buffer may have missed; the buffer accepts each of these
    twice without harm, and the learner takes a batch only once. With several ranks each has a client; those other than
    rank 0 only ask for their shares."""

    def __init__(
        self, endpoint: str, name: str = "learner", *, link_timeout: float | None = None, keys: str | None = None
    ):
        self.dealer = Dealer(endpoint, name, "buffer", link_timeout=link_timeout, keys=keys, role="learner")
        self.name = name
        self.pausing = False
        self._order = threading.Lock()
        self._index, self.redo = -1, 0
        self._last_sent: dict[type[Message], Message] = {}  # the newest of each, in order, to send them again

    def send(self, message: Message) -> None:
        """Send a message; after a reconnect the newest of each kind is sent again. Any thread may call this."""
        with self._order:
            self._last_sent.pop(type(message), None)
            self._last_sent[type(message)] = message
            self.dealer.send(message)

    def hello(self, vocab_size: int | None = None, routing: Routing | None = None) -> None:
        """`routing`: of the experts that the learner replays; see `Model`."""
        self.send(messages.Hello("learner", self.name, os.getpid(), 0))
        if vocab_size is not None:
            self.send(messages.Model(vocab_size, routing))

    def published(self, manifest: messages.Manifest) -> None:
        self.send(messages.Published(manifest))

    def trained(self, index: int) -> None:
        self.send(messages.Trained(index))

    def checkpointed(self, step: int) -> None:
        self.dealer.send(messages.Checkpointed(step))

    def want(self, index: int, version: int) -> None:
        self._index = index
        self.send(messages.Want(index, version))

    def want_share(self, index: int, rank: int) -> None:
        self._index = index
        self.send(messages.WantShare(index, rank))

    def pause(self) -> None:
        """Make `batch` raise Stopped instead of waiting longer. For signal handlers."""
        self.pausing = True

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
            received = self.dealer.receive(timeout=LOOK_SECONDS)
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
            if isinstance(message, messages.Stop) and messages.Want in self._last_sent:
                raise Stopped(drained=message.drain)
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
        """Ask for a report and wait for it; None after `timeout` seconds, or once the buffer is not there any more.
        Raises BusError if the buffer refused something."""
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
        """Report a dead process: see `Lost`."""
        self.dealer.send(messages.Lost(name, pid, how[: messages.MAX_TEXT], for_good, by_itself))

    def close(self) -> None:
        self.dealer.close()
