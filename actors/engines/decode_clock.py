"""Continuous batching as arithmetic on time: which sequences an accelerator decodes when. No model, no sleep, no event
loop: whoever holds the clock says what time it is. The timed engine drives it in real time, the simulator
(`scripts.simulation`) in virtual time.

The clock is at the end of the last step. It moves from event to event (a sequence ends, joins or is aborted, an update
is applied), so a step costs nothing to compute. A step that has begun runs to its end before anything joins or an
update is applied.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from areal_like.types import Finish, Runs


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds. A decode step of n sequences that hold k tokens (prompts included) costs `base` + `per_sequence` · n +
    `per_token` · k. A prompt costs `prefill` per token when it joins, of which a share `fresh` is computed (equal
    prompts are computed once; above 1 if a sequence joins several times). An update costs `apply` and, with
    `recompute`, one step and the prefill of all that is held."""

    base: float = 0.001
    per_sequence: float = 0.0
    per_token: float = 0.0
    prefill: float = 0.0
    apply: float = 0.0
    recompute: bool = True
    fresh: float = 1.0

    def slower(self, factor: float) -> DecodeCost:
        """All that the engine computes takes so many times as long."""
        numbers = {each: factor * getattr(self, each) for each in ("base", "per_sequence", "per_token", "prefill")}
        return replace(self, **numbers)

    def join(self, tokens: float) -> float:
        """Seconds until a sequence of so many tokens can decode."""
        return self.prefill * self.fresh * tokens

    def steps(self, count: int, sequences: int, tokens: int) -> float:
        """Seconds of `count` steps of the same sequences, which hold `tokens` tokens at first."""
        seconds = count * (self.base + self.per_sequence * sequences)
        if self.per_token:
            seconds += self.per_token * (count * tokens + sequences * count * (count - 1) / 2)
        return seconds

    def steps_within(self, seconds: float, sequences: int, tokens: int) -> int:
        """How many such steps end within so many seconds."""
        if seconds <= 0:
            return 0
        growth = self.per_token * sequences / 2
        first = self.base + self.per_sequence * sequences + self.per_token * tokens - growth
        if growth == 0:
            return int(seconds / first)
        return int((math.sqrt(first * first + 4 * growth * seconds) - first) / (2 * growth))


@dataclass(eq=False, slots=True)
class TimedRequest:
    """A sequence to decode: `length` tokens after `prompt` tokens, asked for at `arrival`. `ended` is called with it
    and how it ended; `made` counts its tokens, `runs` says which versions made them. `first` and `last`: steps done
    when it joined, and when it will be complete."""

    name: str
    length: int
    stops: bool
    arrival: float
    ended: Callable[[TimedRequest, Finish], None]
    prompt: int = 0
    made: int = 0
    runs: Runs = field(default_factory=list)
    first: int = 0
    last: int = 0
    run_start: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """An update to `version` that arrived at `arrival`. `begun` is called when decoding stops for it, `ended` once it
    is applied."""

    version: int
    arrival: float
    begun: Callable[[], None]
    ended: Callable[[], None]


class DecodeClock:
    """At most `slots` sequences run, others wait, first in, first out. If the tokens held would exceed `kv_tokens`, the
    newest sequence is preempted: it joins again later, and what it had made is prefilled. `interruptible` False: an
    update waits for the running sequences. `totals`: running totals, in simulated seconds."""

    def __init__(self, cost: DecodeCost, slots: int, *, kv_tokens: float = math.inf, interruptible: bool = True):
        self.cost, self.slots, self.kv_tokens, self._interruptible = cost, slots, kv_tokens, interruptible
        self.version = 0
        self.now = 0.0  # end of the last step or update
        self.steps = 0
        self.held = 0  # tokens in the cache
        self.running: dict[TimedRequest, None] = {}
        self.waiting: deque[TimedRequest] = deque()
        self._ends: list[TimedRequest] = []  # those that run, the first to end first
        self._lasts = array("q")  # their last steps
        self._past: list[tuple[int, int]] = []  # (last step, version) of earlier versions that made running sequences
        self._loads: deque[Load] = deque()
        self._applied: deque[tuple[float, Callable[[], None]]] = deque()  # to be called at their time
        self._boundary: float | None = None  # as `advance` has left it
        self.totals = dict.fromkeys(
            (
                "tokens",
                "joins",
                "updates",
                "busy_seconds",
                "apply_seconds",
                "pause_seconds",
                "pauses",
                "recompute_seconds",
                "preemptions",
            ),
            0.0,
        )

    def submit(self, request: TimedRequest) -> None:
        """Ask for a sequence. Call `advance` once for all that are asked for at the same time."""
        self.waiting.append(request)
        self._boundary = None

    def price(self, cost: DecodeCost) -> None:
        """From now on this is what things cost. Call `advance` before."""
        self.cost, self._boundary = cost, None

    def load(self, load: Load) -> None:
        """Ask for an update, after the step in progress (and the running sequences, if they may not be interrupted).
        Call `advance` before and behind."""
        self._loads.append(load)
        self._boundary = None

    def abort(self, requests: Iterable[TimedRequest], now: float) -> None:
        """End sequences now, with the tokens of all complete steps."""
        self.advance(now)
        for request in requests:
            if request in self.running or request in self.waiting:
                self._end(request, "abort")
        self.advance(now)

    def advance(self, now: float) -> None:
        """Move through every event up to `now`."""
        while True:
            count, seconds, boundary = self._next_boundary()
            if boundary > now:
                break
            if self.running:
                self._run_steps(count, seconds)
            self._at_boundary()
        if self.running and (count := self.cost.steps_within(now - self.now, len(self.running), self.held)):
            self._run_steps(count, self.cost.steps(count, len(self.running), self.held))
            boundary = self._next_boundary()[2]
        self._boundary = boundary
        while self._applied and self._applied[0][0] <= now:
            self._applied.popleft()[1]()

    def due(self) -> float:
        """When something happens next, unless something is asked for before: call `advance` then. inf: never."""
        if self._boundary is None:
            self._boundary = self._next_boundary()[2]
        return min(self._boundary, self._applied[0][0]) if self._applied else self._boundary

    def due_for(self, matters: Callable[[TimedRequest], bool]) -> float:
        """When a sequence ends that `matters` (asked of one after the other, in the order in which they end), or an
        update has been applied, unless something is asked for before: call `advance` then. inf: never.

        What happens before needs no call of its own. Where more intervenes, `due`."""
        due = self.due()
        if not self.running or self.kv_tokens != math.inf or len(self.running) + len(self.waiting) > self.slots:
            return due
        if self._loads:
            if self._applied or not self._interruptible:
                return due
            first = self._ends[: bisect_right(self._lasts, self.steps + 1)]
            return due if any(map(matters, first)) else due + self.cost.apply
        cost, ends, lasts = self.cost, self._ends, self._lasts
        now, steps, held, count = self.now, self.steps, self.held, len(self.running)
        joins: int | None = None
        if self.waiting:  # they join behind the step in progress
            joins = steps + (now < self.waiting[0].arrival)
            ends, lasts = ends[:], lasts[:]
            for each in self.waiting:
                _insert(ends, lasts, each, joins + each.length - each.made)
        for last, request in zip(lasts, ends, strict=True):
            if joins is not None and last > joins:
                now += cost.steps(joins - steps, count, held)
                held += (joins - steps) * count
                for each in self.waiting:
                    held += each.prompt + each.made
                    now += cost.join(each.prompt + each.made)
                steps, count, joins = joins, count + len(self.waiting), None
            if last > steps:
                now += cost.steps(last - steps, count, held)
                held += (last - steps) * count
                steps = last
            if matters(request):
                break
            count -= 1
            held -= request.prompt + request.length
        return min(now, self._applied[0][0]) if self._applied else now

    def drop_loads(self) -> list[Load]:
        """Forget updates that have not begun; returns them."""
        loads, self._loads, self._boundary = list(self._loads), deque(), None
        return loads

    def finish_applied(self) -> None:
        """Call what waits for an update that has begun."""
        while self._applied:
            self._applied.popleft()[1]()

    def _steps_to_boundary(self) -> int:
        """Steps until something may happen while sequences run: the next one ends, the cache is full, or the step that
        holds up a joiner or an update."""
        if (self._loads and self._interruptible) or (self.waiting and self._may_join()):
            return 1 if self.now < self._first_arrival() else 0
        count = self._lasts[0] - self.steps
        if self.kv_tokens != math.inf and len(self.running) > 1:
            count = min(count, max(1, int(self.kv_tokens - self.held) // len(self.running) + 1))
        return count

    def _may_join(self) -> bool:
        if self._loads or len(self.running) >= self.slots:
            return False
        if self.kv_tokens == math.inf or not self.running:
            return True
        first = self.waiting[0]
        return self.held + first.prompt + first.made + len(self.running) + 1 <= self.kv_tokens

    def _first_arrival(self) -> float:
        return self._loads[0].arrival if self._loads else self.waiting[0].arrival

    def _next_boundary(self) -> tuple[int, float, float]:
        """Steps until the next event, their seconds, and its time; infinity if there is nothing to do."""
        if self.running:
            count = self._steps_to_boundary()
            seconds = self.cost.steps(count, len(self.running), self.held)
            return count, seconds, self.now + seconds
        if self._loads or self.waiting:
            return 0, 0.0, max(self.now, self._first_arrival())
        return 0, 0.0, math.inf

    def _run_steps(self, count: int, seconds: float) -> None:
        sequences = len(self.running)
        self.steps += count
        self.now += seconds
        self.held += count * sequences
        totals = self.totals
        totals["tokens"] += count * sequences
        totals["busy_seconds"] += seconds

    def _at_boundary(self) -> None:
        """Between two steps: end the sequences that are complete, apply one update, let waiting ones join."""
        while self._lasts and self._lasts[0] <= self.steps:
            request = self._ends[0]
            self._leave(request)
            request.ended(request, "stop" if request.stops else "length")
        while self.held > self.kv_tokens and len(self.running) > 1:
            self._preempt(next(reversed(self.running)))
        if self._loads and (self._interruptible or not self.running):
            if not self.running:
                self.now = max(self.now, self._loads[0].arrival)
            if self._loads[0].arrival <= self.now:
                self._apply(self._loads.popleft())
        while self.waiting and self._may_join():
            if not self.running:
                self.now = max(self.now, self.waiting[0].arrival)
            if self.waiting[0].arrival > self.now:
                break
            self._join(self.waiting.popleft())

    def _join(self, request: TimedRequest) -> None:
        request.first = request.run_start = self.steps
        request.last = self.steps + request.length - request.made
        self.running[request] = None
        _insert(self._ends, self._lasts, request, request.last)
        known = request.prompt + request.made
        self.held += known
        if self.cost.prefill:
            seconds = self.cost.join(known)
            self.now += seconds
            self.totals["busy_seconds"] += seconds
        self.totals["joins"] += 1

    def _apply(self, load: Load) -> None:
        if self.running:
            oldest = next(iter(self.running)).run_start
            self._past = [each for each in self._past if each[0] > oldest]
            self._past.append((self.steps, self.version))
        self.version = load.version
        load.begun()
        recompute = 0.0
        if self.cost.recompute and self.running:
            recompute = self.cost.steps(1, len(self.running), self.held) + self.cost.prefill * self.held
        self._applied.append((self.now + self.cost.apply, load.ended))
        self.now += self.cost.apply + recompute
        self.totals["updates"] += 1
        self.totals["apply_seconds"] += self.cost.apply
        self.totals["pause_seconds"] += self.cost.apply if self.running else 0.0
        self.totals["pauses"] += bool(self.running)
        self.totals["recompute_seconds"] += recompute

    def _end_run(self, request: TimedRequest) -> None:
        """Note which versions made it since it joined."""
        runs, begin = request.runs, request.run_start
        for end, version in (*self._past, (self.steps, self.version)) if self._past else ((self.steps, self.version),):
            if end > begin:
                before = runs.pop()[1] if runs and runs[-1][0] == version else 0  # it was preempted meanwhile
                runs.append((version, end - begin + before))
                begin = end

    def _leave(self, request: TimedRequest) -> None:
        """Out of the running ones; what it has made so far counts as its own."""
        self._end_run(request)
        made = self.steps - request.first
        request.made += made
        self.held -= request.prompt + request.made
        del self.running[request]
        place = self._ends.index(request)
        del self._ends[place], self._lasts[place]

    def _preempt(self, request: TimedRequest) -> None:
        self._leave(request)
        self.waiting.appendleft(request)
        self.totals["preemptions"] += 1

    def _end(self, request: TimedRequest, finish: Finish) -> None:
        if request in self.running:
            self._leave(request)
        else:
            self.waiting.remove(request)
        request.ended(request, finish)


def _insert(ends: list[TimedRequest], lasts: array[int], request: TimedRequest, last: int) -> None:
    """Behind all that end no later."""
    place = bisect_right(lasts, last)
    ends.insert(place, request)
    lasts.insert(place, last)
