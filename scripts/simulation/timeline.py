"""Virtual time: events in order, the wire between the buffer and its peers, and processes that share cores."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from areal_like.wire.frames import Payloads, Received
from areal_like.wire.messages import Message, Push, Refused

from .costs import Sample

Call = tuple[Callable[..., object], tuple[Any, ...]]
IDLE_SECONDS = 0.2
"""The buffer's loop turns so often without a message."""


class Timeline:
    """Calls in the order of their times; those of one time in the order in which they were scheduled. `now` in seconds;
    `events` counts the calls so far; `over` ends `run`."""

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

    def clock(self) -> float:
        return self.now


class SimulatedRouter:
    """Stands for `bus.Router`: messages arrive `latency` seconds later, in order, as objects. `wake` is called when one
    is there for the buffer."""

    def __init__(self, timeline: Timeline, latency: float):
        self.timeline, self.latency, self.endpoint = timeline, latency, "simulated"
        self.refused, self.refusals = 0, list[str]()
        self.peers: dict[bytes, Any] = {}  # each has `receive(message, payloads)`
        self.incoming: deque[tuple[bytes, Received]] = deque()
        self.samples = 0  # in pushes that have arrived
        self.wake: Callable[[], None] = lambda: None

    def say(self, peer: bytes, message: Message, payloads: Payloads = ()) -> None:
        """Send a message from a peer to the buffer."""
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
        self.refused += 1
        self.refusals.append(reason)
        self.send(peer, Refused(reason))


class BufferLoop:
    """Schedules the turns of the buffer: at once when a message is there, unless it is still busy with earlier ones, of
    which each takes `per_message` seconds, and each pushed sample `per_sample` on one of the `cores`; and
    `IDLE_SECONDS` after its last turn."""

    def __init__(
        self, router: SimulatedRouter, cores: Cores, turn: Callable[[], None], per_message: float, per_sample: float
    ):
        self._timeline, self._router, self._cores, self._turn = router.timeline, router, cores, turn
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
            self._cores.hold(1, busy)
            self._free_at = self._timeline.now + busy
            self._plan(self._free_at)
            return
        count = len(self._router.incoming)
        self._turn()
        self._free_at = self._timeline.now + (count - len(self._router.incoming)) * self._per_message
        self._plan(self._free_at if self._router.incoming else self._timeline.now + IDLE_SECONDS)


class Cores:
    """Cores of the machine that all actors share (`sample.cores` None: each has its own). The process that waits
    longest gets the next free one. `seed`: of the jitter."""

    def __init__(self, timeline: Timeline, sample: Sample, seed: int):
        self.timeline, self.sample = timeline, sample
        self._free = math.inf if sample.cores is None else sample.cores
        self._waiting: deque[Process] = deque()
        self._dice = random.Random(seed)

    def pace(self) -> float:
        """A factor of durations: 1 on average, with a relative standard deviation of `jitter` (gamma distribution)."""
        if not self.sample.jitter:
            return 1.0
        shape = self.sample.jitter**-2
        return self._dice.gammavariate(shape, 1.0 / shape)

    def hold(self, cores: int, seconds: float) -> None:
        """Buffer or learner take so many cores for so long; one is left to the actors. Turns under way go on."""
        if self.sample.cores is not None and (held := min(cores, self.sample.cores - 1)):
            self._free -= held
            self.timeline.after(seconds, self._release, held)

    def ask(self, process: Process) -> None:
        """Queue a process for a turn."""
        self._waiting.append(process)
        self._release(0)

    def _release(self, cores: int) -> None:
        self._free += cores
        while self._waiting and self._free > 0:
            process = self._waiting.popleft()
            self._free -= 1
            self.timeline.after(process.work(), self._end, process)

    def _end(self, process: Process) -> None:
        process.end()
        self._release(1)


class Process:
    """A process that works in turns of its loop, on the cores:

        asleep ──► something is due ──► `wake` seconds ──► waits for a core ──► works ──► sends its messages ──► asleep

    `turn` handles the calls that are due when it begins; a later one the rest. `send` puts a message on the wire.
    `seconds`: of the turn so far."""

    def __init__(self, cores: Cores):
        self._cores, self.seconds = cores, 0.0
        self._asleep, self._pace = True, 1.0
        self._calls: list[Call] = []
        self._unsent: list[tuple[Message, Payloads]] = []

    def due(self, call: Callable[..., object], *arguments: object) -> None:
        """Make this call in the next turn."""
        self._calls.append((call, arguments))
        if self._asleep:
            self._asleep = False
            self._cores.timeline.after(self._cores.sample.wake * self._cores.pace(), self._cores.ask, self)

    def say(self, message: Message, payloads: Payloads = ()) -> None:
        """Send a message at the turn's end."""
        self._unsent.append((message, payloads))

    def takes_sample(self) -> None:
        """This turn handles a sample that has ended."""
        self.seconds += self._pace * self._cores.sample.actor

    def begins_sample(self) -> float:
        """This turn begins a sample. Returns when the engine gets it."""
        self.seconds += self._pace * self._cores.sample.begin
        return self._cores.timeline.now + self.seconds

    def work(self) -> float:
        """Begin a turn. Returns its seconds."""
        self._pace, self.seconds = self._cores.pace(), 0.0
        calls, self._calls = self._calls, []
        self.turn(calls)
        return self.seconds

    def turn(self, calls: Sequence[Call]) -> None:
        raise NotImplementedError

    def send(self, message: Message, payloads: Payloads) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """End a turn."""
        unsent, self._unsent = self._unsent, []
        for message, payloads in unsent:
            self.send(message, payloads)
        self._asleep = not self._calls
        if self._calls:
            self._cores.ask(self)
