"""Virtual time: events in order, the wire between the buffer and its peers, and the turns of the buffer."""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from areal_like.errors import UserError
from areal_like.wire.frames import Payloads, Received
from areal_like.wire.messages import Message, Push

IDLE_SECONDS = 0.2
"""The buffer's loop turns so often without a message."""


class Stuck(UserError):
    """A simulated run makes no progress, and is not over."""


class Timeline:
    """Calls by time, then in order of scheduling. `now` in seconds; `events` counts calls so far; `over` ends `run`."""

    def __init__(self) -> None:
        self.now, self.events, self.over = 0.0, 0, False
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def at(self, when: float, call: Callable[..., object], *arguments: object) -> None:
        """Schedule a call; now if its time has passed."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), call, arguments))

    def after(self, seconds: float, call: Callable[..., object], *arguments: object) -> None:
        self.at(self.now + seconds, call, *arguments)

    def run(self, most: int) -> bool:
        """Make the next calls, at most so many, or until `over`; False if there are none left."""
        for _ in range(most):
            if not self._heap:
                return False
            self.now, _, call, arguments = heapq.heappop(self._heap)
            self.events += 1
            call(*arguments)
            if self.over:
                break
        return True


class SimulatedRouter:
    """Stands for `bus.Router`: objects arrive `latency` seconds later, in order; for the buffer with `wake`."""

    def __init__(self, timeline: Timeline, latency: float):
        self.timeline, self.latency, self.refused = timeline, latency, 0
        self.peers: dict[bytes, Any] = {}  # each has `receive(message, payloads)`
        self.incoming: deque[tuple[bytes, Received]] = deque()
        self.samples = 0  # in pushes that have arrived
        self.wake: Callable[[], None] = lambda: None

    def say(self, peer: bytes, message: Message, payloads: Payloads = ()) -> None:
        self.timeline.after(self.latency, self._arrive, peer, Received(message, payloads))

    def _arrive(self, peer: bytes, received: Received) -> None:
        self.incoming.append((peer, received))
        if isinstance(received.message, Push):
            self.samples += sum([samples for _, samples, _ in received.message.table.groups])
        self.wake()

    def receive(self, timeout: float) -> tuple[bytes, Received] | None:
        return self.incoming.popleft() if self.incoming else None

    def send(self, peer: bytes, message: Message, payloads: Payloads = ()) -> None:
        if here := self.peers.get(peer):
            self.timeline.after(self.latency, here.receive, message, payloads)

    def refuse(self, peer: bytes, reason: str) -> None:
        raise Stuck(f"the buffer refused a message of {peer.decode()}: {reason}")


class BufferLoop:
    """Schedules the turns of the buffer: when a message is there and it has handled the earlier ones, of which each
    takes `per_message` seconds, and each pushed sample `per_sample`; and `IDLE_SECONDS` after its last turn."""

    def __init__(self, router: SimulatedRouter, turn: Callable[[], None], per_message: float, per_sample: float):
        self._timeline, self._router, self._turn = router.timeline, router, turn
        self._per_message, self._per_sample = per_message, per_sample
        self._free_at, self._due = 0.0, math.inf
        router.wake = lambda: self._plan(max(self._timeline.now, self._free_at))
        self._plan(0.0)

    def _plan(self, when: float) -> None:
        if when < self._due:
            self._due = when
            self._timeline.at(when, self._take, when)

    def _take(self, due: float) -> None:
        if due != self._due:
            return  # an earlier turn has come instead
        self._due = math.inf
        samples, self._router.samples = self._router.samples, 0
        if busy := samples * self._per_sample:  # the buffer decides once it has read these samples
            self._free_at = self._timeline.now + busy
            self._plan(self._free_at)
            return
        count = len(self._router.incoming)
        self._turn()
        self._free_at = self._timeline.now + (count - len(self._router.incoming)) * self._per_message
        self._plan(self._free_at if self._router.incoming else self._timeline.now + IDLE_SECONDS)
