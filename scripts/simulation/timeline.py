"""Virtual time: events in order, and the wire between the buffer and its peers."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

from areal_like.wire.frames import Payloads, Received
from areal_like.wire.messages import Message, Refused

from .pushes import HandedOver

_Event = tuple[float, int, Callable[..., object], tuple[Any, ...]]


class Timeline:
    """Calls in the order of their times; those of the same time in the order in which they were asked for. `now` in
    seconds; `events` counts the calls so far; `over` ends `run`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.over = False
        self._heap: list[_Event] = []
        self._lane: deque[_Event] = deque()  # of messages, which all take as long: in order without a heap
        self._order = itertools.count()

    def at(self, when: float, call: Callable[..., object], *arguments: object) -> None:
        """Call it at a time, which is now if it has passed."""
        heapq.heappush(self._heap, (when if when > self.now else self.now, next(self._order), call, arguments))

    def in_lane(self, seconds: float, call: Callable[..., object], *arguments: object) -> None:
        """Call it in so many seconds, which must be the same in all calls."""
        self._lane.append((self.now + seconds, next(self._order), call, arguments))

    def after(self, seconds: float, call: Callable[..., object], *arguments: object) -> None:
        self.at(self.now + seconds, call, *arguments)

    def run(self, most: int) -> bool:
        """Make the next calls, at most so many, or until `over`; False if there are none left."""
        heap, lane = self._heap, self._lane
        for _ in range(most):
            if lane and (not heap or lane[0] < heap[0]):
                self.now, _, call, arguments = lane.popleft()
            elif heap:
                self.now, _, call, arguments = heapq.heappop(heap)
            else:
                return False
            self.events += 1
            call(*arguments)
            if self.over:
                break
        return True

    @property
    def nothing_else_now(self) -> bool:
        """Is the present call the last one of this time?"""
        heap, lane = self._heap, self._lane
        return not (heap and heap[0][0] <= self.now) and not (lane and lane[0][0] <= self.now)

    def clock(self) -> float:
        return self.now


class Peer(Protocol):
    """An actor or learner on the wire. `hears`: kinds of messages that change anything for it."""

    hears: Collection[type[Message]]

    def receive(self, message: Message, payloads: Payloads) -> None: ...


class SimulatedRouter:
    """In the place of `bus.Router`: messages arrive `latency` seconds later, in order. `wake` is called when
    one is there for the buffer. The messages are the real ones, as objects: they are not packed."""

    def __init__(self, timeline: Timeline, latency: float):
        self.timeline, self.latency = timeline, latency
        self.endpoint = "simulated"
        self.refused = 0
        self.refusals: list[str] = []
        self.peers: dict[bytes, Peer] = {}
        self.incoming: deque[tuple[bytes, Received]] = deque()
        self.samples = 0  # in pushes that have arrived
        self.wake: Callable[[], None] = lambda: None
        self.closed = False

    def close(self) -> None:
        """The buffer's process has ended: what is on the way is lost."""
        self.closed = True
        self.peers.clear()
        self.incoming.clear()

    def say(self, peer: bytes, message: Message, payloads: Payloads = ()) -> None:
        """A peer sends a message to the buffer."""
        self.timeline.in_lane(self.latency, self._arrive, peer, Received(message, payloads))

    def _arrive(self, peer: bytes, received: Received) -> None:
        if self.closed:
            return
        self.incoming.append((peer, received))
        if isinstance(received.message, HandedOver):
            self.samples += sum([head.samples for head in received.message.heads])
        self.wake()

    def receive(self, timeout: float) -> tuple[bytes, Received] | None:
        return self.incoming.popleft() if self.incoming else None

    def send(self, peer: bytes, message: Message, payloads: Payloads = ()) -> None:
        if (here := self.peers.get(peer)) and type(message) in here.hears:
            self.timeline.in_lane(self.latency, here.receive, message, payloads)

    def refuse(self, peer: bytes, reason: str) -> None:
        self.refused += 1
        self.refusals.append(reason)
        self.send(peer, Refused(reason))


class Turns:
    """When the buffer's loop turns: at once when a message is there, unless it is still busy with those before, each of
    which takes `seconds_per_message`, and `seconds_per_sample` in pushes; and `idle_seconds` after its last turn.
    `waited`: seconds for which the last turn waited, for its disk. `takes`: told of the seconds that samples take, on a
    core. None once the router is closed."""

    def __init__(
        self,
        timeline: Timeline,
        router: SimulatedRouter,
        turn: Callable[[], None],
        seconds_per_message: float,
        seconds_per_sample: float = 0.0,
        idle_seconds: float = 0.2,
        waited: Callable[[], float] = lambda: 0.0,
        takes: Callable[[float], None] = lambda seconds: None,
    ):
        self._timeline, self._router, self._turn, self._waited = timeline, router, turn, waited
        self._takes = takes
        self._seconds_per_message, self._seconds_per_sample = seconds_per_message, seconds_per_sample
        self._idle_seconds = idle_seconds
        self._free_at, self._due, self._idle_at = 0.0, math.inf, math.inf
        self._idles = False
        router.wake = self.wake
        self._plan(0.0)

    def wake(self) -> None:
        self._plan(max(self._timeline.now, self._free_at))

    def _plan(self, when: float) -> None:
        if when < self._due:
            self._due = when
            if when == self._timeline.now and self._timeline.nothing_else_now:
                self._take(when)
            else:
                self._timeline.at(when, self._take, when)

    def _take(self, due: float) -> None:
        if due != self._due or self._router.closed:
            return  # an earlier turn has come instead
        self._due = math.inf
        samples, self._router.samples = self._router.samples, 0
        if busy := samples * self._seconds_per_sample:
            self._takes(busy)
            self._free_at = self._timeline.now + busy  # what rests on these samples is decided once they are looked at
            self._plan(self._free_at)
            return
        count = len(self._router.incoming)
        self._turn()
        handled = count - len(self._router.incoming)
        self._free_at = self._timeline.now + handled * self._seconds_per_message + self._waited()
        if self._router.incoming:
            self._plan(self._free_at)
        else:
            self._idle_at = self._timeline.now + self._idle_seconds
            if not self._idles:
                self._idles = True
                self._timeline.at(self._idle_at, self._idle)

    def _idle(self) -> None:
        """Turn if there was no turn for so long; one event waits for that, however many turns there were."""
        if self._router.closed:
            return
        if self._timeline.now < self._idle_at:
            self._timeline.at(self._idle_at, self._idle)
            return
        self._idles = False
        if self._due == math.inf:
            self._due = self._timeline.now
            self._take(self._due)
