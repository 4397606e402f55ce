"""Continuous batching as arithmetic on time: which sequences an accelerator decodes when. The timed engine drives it in
real time, the simulator (`scripts.simulation`) in virtual time. Joins and updates wait for the end of a step."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

from areal_like.sampling import longer_key, stream_key, uniform
from areal_like.types import Finish, Runs

_NORMAL = NormalDist()
TOTALS = ("tokens", "updates", "busy_seconds", "apply_seconds", "pause_seconds", "pauses")


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds. A decode step of n sequences that hold k tokens (prompts included) costs `base` + `per_sequence` · n +
    `per_token` · k; a sequence that joins `prefill` per token; an update `apply` and, with `recompute`, a step and the
    prefill of all tokens held."""

    base: float = 0.001
    per_sequence: float = 0.0
    per_token: float = 0.0
    prefill: float = 0.0
    apply: float = 0.0
    recompute: bool = True

    def steps(self, count: int, sequences: int, tokens: int) -> float:
        """Seconds of `count` steps of the same sequences, which hold `tokens` tokens at first."""
        held = count * tokens + sequences * count * (count - 1) / 2
        return count * (self.base + self.per_sequence * sequences) + self.per_token * held

    def steps_within(self, seconds: float, sequences: int, tokens: int) -> int:
        """Number of such steps that end within so many seconds."""
        growth = self.per_token * sequences / 2
        first = self.base + self.per_sequence * sequences + self.per_token * tokens - growth
        if seconds <= 0 or growth == 0:
            return int(max(0.0, seconds) / first)
        return int((math.sqrt(first * first + 4 * growth * seconds) - first) / (2 * growth))


@dataclass(eq=False, slots=True)
class TimedRequest:
    """A sequence to decode: `length` tokens after `prompt` tokens, submitted at `arrival`. `ended` is called with it
    and its finish reason. `runs`: (version, tokens) pairs so far; `last`: steps done when it will be complete; `begin`:
    those done when it joined, or at the last update."""

    name: str
    length: int
    stops: bool
    arrival: float
    ended: Callable[[TimedRequest, Finish], None]
    prompt: int = 0
    runs: Runs = field(default_factory=list)
    begin: int = 0
    last: int = 0

    @property
    def made(self) -> int:
        return sum([count for _, count in self.runs])


class Load(NamedTuple):
    """An update to `version` that arrived at `arrival`. `ended` is called once it is applied."""

    version: int
    arrival: float
    ended: Callable[[], None]


class DecodeClock:
    """At most `slots` sequences run, `waiting` ones first in, first out; call `advance` once after all that are added
    at one time. `interruptible` False: an update waits for the running sequences. `totals`: in simulated seconds."""

    def __init__(self, cost: DecodeCost, slots: int, *, interruptible: bool = True):
        self.cost, self.slots, self._interruptible = cost, slots, interruptible
        self.version = 0
        self.now = 0.0  # end of the last step or update
        self.steps = 0
        self.held = 0  # tokens in the cache
        self.running: list[TimedRequest] = []  # the first to end first
        self.waiting: deque[TimedRequest] = deque()
        self._loads: deque[Load] = deque()
        self._applied: deque[tuple[float, Callable[[], None]]] = deque()  # to be called at their time
        self.totals = dict.fromkeys(TOTALS, 0.0)

    def load(self, load: Load) -> None:
        """Queue an update. Call `advance` before and after."""
        self._loads.append(load)

    def abort(self, requests: Iterable[TimedRequest], now: float) -> None:
        """End sequences now, with the tokens of all complete steps."""
        self.advance(now)
        for request in requests:
            if request in self.running:
                self._leave(request)
                request.ended(request, "abort")
            elif request in self.waiting:
                self.waiting.remove(request)
                request.ended(request, "abort")
        self.advance(now)

    def advance(self, now: float) -> None:
        """Move through every event up to `now`."""
        while (event := self._next_event()) <= now:
            if self.running:
                self._run_steps(self._steps_to_event())
            self.now = max(self.now, event)
            self._between_steps()
        if self.running and (count := self.cost.steps_within(now - self.now, len(self.running), self.held)):
            self._run_steps(count)
        while self._applied and self._applied[0][0] <= now:
            self._applied.popleft()[1]()

    def due(self) -> float:
        """Time of the next event, unless something is submitted before: call `advance` then. inf: never."""
        return min(self._next_event(), self._applied[0][0] if self._applied else math.inf)

    def _steps_to_event(self) -> int:
        """Steps until the next running sequence ends, or until the step ends for which a join or an update waits."""
        joins = self.waiting and not self._loads and len(self.running) < self.slots
        if joins or (self._loads and self._interruptible):
            return 1 if self.now < self._first_arrival() else 0
        return self.running[0].last - self.steps

    def _first_arrival(self) -> float:
        first = self._loads or self.waiting
        return first[0].arrival if first else math.inf

    def _next_event(self) -> float:
        if self.running:
            return self.now + self.cost.steps(self._steps_to_event(), len(self.running), self.held)
        return max(self.now, self._first_arrival())

    def _run_steps(self, count: int) -> None:
        seconds = self.cost.steps(count, len(self.running), self.held)
        self.steps += count
        self.now += seconds
        self.held += count * len(self.running)
        self.totals["tokens"] += count * len(self.running)
        self.totals["busy_seconds"] += seconds

    def _between_steps(self) -> None:
        """End the sequences that are complete, apply one update, let waiting ones join."""
        while self.running and self.running[0].last <= self.steps:
            request = self.running[0]
            self._leave(request)
            request.ended(request, "stop" if request.stops else "length")
        if self._loads and (self._interruptible or not self.running) and self._loads[0].arrival <= self.now:
            self._apply(self._loads.popleft())
        while self.waiting and not self._loads and len(self.running) < self.slots:
            if self.waiting[0].arrival > self.now:
                break
            self._join(self.waiting.popleft())

    def _join(self, request: TimedRequest) -> None:
        request.begin, request.last = self.steps, self.steps + request.length
        insort(self.running, request, key=lambda each: each.last)
        self.held += request.prompt
        seconds = self.cost.prefill * request.prompt
        self.now += seconds
        self.totals["busy_seconds"] += seconds

    def _apply(self, load: Load) -> None:
        for request in self.running:
            self._end_run(request)
        self.version = load.version
        self.now += self.cost.apply
        self._applied.append((self.now, load.ended))
        self.totals["updates"] += 1
        self.totals["apply_seconds"] += self.cost.apply
        if self.running:
            self.totals["pauses"] += 1
            self.totals["pause_seconds"] += self.cost.apply
            if self.cost.recompute:
                self.now += self.cost.steps(1, len(self.running), self.held) + self.cost.prefill * self.held

    def _end_run(self, request: TimedRequest) -> None:
        if self.steps > request.begin:
            request.runs.append((self.version, self.steps - request.begin))
            request.begin = self.steps

    def _leave(self, request: TimedRequest) -> None:
        self._end_run(request)
        self.held -= request.prompt + request.made
        self.running.remove(request)


class AnswerLengths:
    """Lengths of made-up answers, in tokens: a function of prompt and sampling key, so runs repeat. A prompt's
    median is log-normal(`median`, `sigma`), a sample's length log-normal(its prompt's median, `noise`). `trace`: a
    prompt draws one of these lists instead, and its samples draw from it. Raises ValueError."""

    def __init__(
        self, median: float, sigma: float, noise: float, seed: int = 0, trace: Sequence[Sequence[int]] | None = None
    ):
        self._median, self._sigma, self._noise, self._key = median, sigma, noise, stream_key(seed)
        self._trace = trace or []
        if not all(each and min(each) >= 1 for each in self._trace):
            raise ValueError("trace: got an empty list or a length below 1, expected lists of lengths of at least 1")

    def of(self, prompt: int, key: int) -> int:
        """Whole length of the sample with this key: at least 1. `prompt`: `digest_of` its prompt."""
        draw = uniform(longer_key(self._key, key))
        if self._trace:
            lengths = self._trace[int(uniform(longer_key(self._key, prompt)) * len(self._trace))]
            return lengths[int(draw * len(lengths))]
        spread = self._sigma * normal(uniform(longer_key(self._key, prompt))) if self._sigma else 0.0
        if self._noise:
            spread += self._noise * normal(draw)
        return max(1, round(self._median * math.exp(spread)))


@lru_cache(1 << 14)  # a prompt has many samples
def normal(draw: float) -> float:
    return _NORMAL.inv_cdf(max(draw, 2.0**-53))
