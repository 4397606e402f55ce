"""Processes that work in turns of their loop, on cores that they share, as actors do (`actors.session`).

    asleep ──► something is due ──► `wake` seconds ──► waits for a core ──► works ──► says what came of it ──► asleep
                                                            ▲                              │
                                                            └───── more is due by now ─────┘

A turn handles all that is due when it begins. What becomes due meanwhile is left to the next one.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from areal_like.wire.frames import Payloads
from areal_like.wire.messages import Message

from .costs import Sample
from .timeline import Timeline

SUBMITTING = 0.5
"""Share of what it costs to begin a sample, up to the moment at which the engine gets it."""


class Cores:
    """Those of the machine on which all actors run (`sample.cores` None: each has its own). Who waits longest gets the
    next free one. `seed`: of the scatter."""

    def __init__(self, timeline: Timeline, sample: Sample, seed: int = 0):
        self.timeline, self.sample = timeline, sample
        self._free: float = math.inf if sample.cores is None else sample.cores
        self._waiting: deque[Process] = deque()
        self._working: dict[Process, None] = {}  # who has worked longest comes first
        self._dice = random.Random(seed)

    def pace(self) -> float:
        """A factor for what something takes: 1 on average, with a relative standard deviation of `jitter` (a gamma
        distribution: exponential at 1)."""
        if not self.sample.jitter:
            return 1.0
        shape = self.sample.jitter**-2
        return self._dice.gammavariate(shape, 1.0 / shape)

    def interrupt(self, seconds: float) -> None:
        """Another process takes a core now, for so long: a free one, or else that of who has worked longest."""
        if self.sample.cores is None:
            return
        if self._free > 0 or not self._working:
            self._free -= 1
            self.timeline.after(seconds, self._release)
        else:
            next(iter(self._working)).ends_at += seconds

    def hold(self, cores: int, seconds: float) -> None:
        """The learner takes so many cores now, for so long; one is left to the others. Turns under way end as if
        nothing had come."""
        if self.sample.cores is None or not (held := min(cores, self.sample.cores - 1)):
            return
        self._free -= held
        self.timeline.after(seconds, self._release, held)

    def ask(self, process: Process) -> None:
        """It has woken, and wants a turn."""
        self._waiting.append(process)
        self._share_out()

    def _share_out(self) -> None:
        while self._waiting and self._free > 0:
            process = self._waiting.popleft()
            self._free -= 1
            self._working[process] = None
            process.ends_at = self.timeline.now + process.work()
            self.timeline.at(process.ends_at, self._end, process)

    def _end(self, process: Process) -> None:
        if self.timeline.now < process.ends_at:  # it was interrupted
            self.timeline.at(process.ends_at, self._end, process)
            return
        del self._working[process]
        process.end()
        self._release()

    def _release(self, cores: int = 1) -> None:
        self._free += cores
        self._share_out()


class Process:
    """`before` and `after` are called in each turn, around the calls that are due; `say` sends what they have said, at
    the turn's end. `seconds`: of the turn, as far as its calls were made."""

    def __init__(
        self,
        cores: Cores,
        before: Callable[[], None],
        after: Callable[[], None],
        say: Callable[[Message, Payloads], None],
    ):
        self._cores, self._before, self._after, self._say = cores, before, after, say
        self.ends_at = 0.0
        self.handles = False  # the calls of a turn are being made
        self._state: Literal["asleep", "coming", "working", "stopped"] = "asleep"
        self._calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._said: list[tuple[Message, Payloads]] = []
        self._pace, self.seconds, self._submitted = 1.0, 0.0, 0.0

    def due(self, call: Callable[..., object], *arguments: object) -> None:
        """Make this call in the next turn."""
        if self._state == "stopped":
            return
        self._calls.append((call, arguments))
        if self._state == "asleep":
            self._state = "coming"
            self._cores.timeline.after(self._cores.sample.wake * self._cores.pace(), self._cores.ask, self)

    def hold(self, message: Message, payloads: Payloads) -> None:
        """Say it at the turn's end."""
        self._said.append((message, payloads))

    def ended(self) -> None:
        """This turn handles a sample that has ended."""
        self.seconds += self._pace * self._cores.sample.actor
        self._submitted = self.seconds

    def begins(self) -> float:
        """This turn begins a sample. Returns when the engine gets it."""
        seconds = self._pace * self._cores.sample.begin
        self.seconds += seconds
        self._submitted += SUBMITTING * seconds
        return self._cores.timeline.now + self._submitted

    def work(self) -> float:
        """A turn begins. Returns its seconds."""
        if self._state == "stopped":
            return 0.0
        self._state = "working"
        self._pace, self.seconds, self._submitted = self._cores.pace(), 0.0, 0.0
        self.handles = True
        self._before()
        calls, self._calls = self._calls, []
        for call, arguments in calls:
            call(*arguments)
        self._after()
        self.handles = False
        return self.seconds

    def end(self) -> None:
        """A turn is over."""
        self.tell()
        if self._state == "working":
            self._state = "asleep"
            if self._calls:
                self._state = "coming"
                self._cores.ask(self)

    def tell(self) -> None:
        """Say all that is held."""
        said, self._said = self._said, []
        for each in said:
            self._say(*each)

    def stop(self) -> None:
        """The process has ended; its unfinished work is discarded."""
        self._state = "stopped"
        self._calls, self._said = [], []
