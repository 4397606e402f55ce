"""The timed engine: takes the time of an accelerator, without a model. For experiments on the system itself.

Real processes and a real buffer talk to an engine whose decode step costs `base + per_sequence · n` seconds for n
running sequences. How long a sequence gets is a function of its prompt and its sampling key, so a run can be
repeated. Batching is continuous, with at most `slots` running and the others waiting, first in, first out.

There is no task and no sleep per step. The engine keeps a decode clock, the time of its last step's end, and moves
it from event to event (a sequence ends, joins, is aborted; an update is applied) whenever it is called or its timer
fires. A timer that fires late finds the clock where it should have been: a busy event loop delays the answers, never
the simulated accelerator. A step that has begun runs to its end before anything joins or an update is applied.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Literal

import numpy as np
import xxhash

from areal_like.sampling import stream_key, uniforms
from areal_like.types import Completion, Finish, Limits, Runs
from areal_like.weights.update import Update

_NORMAL = NormalDist()
_TOKEN_IDS = 8  # ids that made-up responses use: 0..7, stop tokens excepted


@dataclass(eq=False, slots=True)
class _Request:
    """`first` and `last`: number of steps done when it joined, and when it will be complete."""

    name: str
    limits: Limits
    length: int
    stops: bool
    arrival: float
    future: asyncio.Future[Completion]
    first: int = 0
    last: int = 0
    run_start: int = 0
    runs: Runs = field(default_factory=list)


class TimedEngine:
    """A `RolloutEngine` (see `areal_like.interfaces`) that decodes made-up tokens in the time that real ones take.

    `base`, `per_sequence`: seconds of a decode step. `median`, `sigma`, `noise`: a prompt's median length is
    log-normal(median, sigma), a sample's length log-normal(its prompt's median, noise); `limits.max_tokens` caps it.
    `trace`: lengths to draw from instead: a list, or a file (a JSON list, or numbers separated by white space).
    `apply`: seconds during which a weight update stops decoding. `kv_policy` "recompute" adds the time of one decode
    step for the running sequences; "keep" adds none. `interruptible` False: an update waits for the running sequences.
    Raises ValueError for a knob out of range.
    """

    def __init__(  # noqa: PLR0913 (each is a knob)
        self,
        *,
        base: Annotated[float, "(0, inf)"] = 0.001,
        per_sequence: Annotated[float, "[0, inf)"] = 0.0,
        slots: Annotated[int, "[1, inf)"] = 64,
        median: Annotated[float, "(0, inf)"] = 100.0,
        sigma: Annotated[float, "[0, inf)"] = 1.0,
        noise: Annotated[float, "[0, inf)"] = 0.3,
        seed: Annotated[int, "[0, inf)"] = 0,
        trace: str | Sequence[int] | None = None,
        apply: Annotated[float, "[0, inf)"] = 0.0,
        kv_policy: Literal["recompute", "keep"] = "recompute",
        interruptible: bool = True,
    ):
        if base <= 0 or slots < 1 or median <= 0 or min(per_sequence, sigma, noise, apply) < 0:
            raise ValueError("base, slots and median must be above 0; per_sequence, sigma, noise and apply not below")
        if kv_policy not in ("recompute", "keep"):
            raise ValueError(f"kv_policy must be 'recompute' or 'keep', not {kv_policy!r}")
        self.version = 0
        self.digest = ""
        self.slots = slots
        self._base, self._per_sequence, self._apply_seconds = base, per_sequence, apply
        self._median, self._sigma, self._noise, self._seed = median, sigma, noise, seed
        self._trace = _read_trace(trace) if isinstance(trace, str) else list(trace or ())
        if self._trace and min(self._trace) < 1:
            raise ValueError("trace: every length must be at least 1")
        self._recompute, self._interruptible = kv_policy == "recompute", interruptible
        self._clock = 0.0  # end of the last step or update, in the event loop's time
        self._steps = 0
        self._running: dict[_Request, None] = {}
        self._ends: list[tuple[int, int, _Request]] = []  # heap of (last step, tie-break, request)
        self._waiting: deque[_Request] = deque()
        self._loads: deque[tuple[Update, float, asyncio.Future[None]]] = deque()
        self._applied: deque[tuple[float, asyncio.Future[None]]] = deque()  # done once the loop's time gets there
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._totals = dict.fromkeys(
            (
                "tokens",
                "joins",
                "updates",
                "busy_seconds",
                "apply_seconds",
                "pause_seconds",
                "pauses",
                "recompute_seconds",
            ),
            0.0,
        )

    def length(self, tokens: np.ndarray, limits: Limits) -> int:
        """Tokens that this sample still gets, `limits.max_tokens` aside.

        With an offset, the last `offset` tokens of the prompt are the sample's own, from an earlier call: its whole
        length stays that of the original prompt.
        """
        own = limits.offset if limits.offset < len(tokens) else 0
        prompt = np.asarray(tokens[: len(tokens) - own], np.int32)
        sample = stream_key(self._seed, limits.key)
        if self._trace:
            whole = self._trace[int(_uniform(sample) * len(self._trace))]
        else:
            spread = self._sigma * _spread(stream_key(self._seed, xxhash.xxh3_64_intdigest(prompt.tobytes())))
            whole = round(self._median * math.exp(spread + self._noise * _normal(sample)))
        return max(1, whole - limits.offset)

    async def generate(self, tokens: np.ndarray, limits: Limits, request: str = "") -> Completion:
        """Wait for as long as decoding takes. Cancelling the caller frees the slot. Raises ValueError, RuntimeError."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        if limits.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        loop = asyncio.get_running_loop()
        wanted = self.length(tokens, limits)
        length, stops = min(wanted, limits.max_tokens), wanted <= limits.max_tokens
        asked = _Request(request, limits, length, stops, loop.time(), loop.create_future())
        if not self._waiting:
            self._advance()
            loop.call_soon(self._advance)  # once for all that come in this turn of the loop
        self._waiting.append(asked)
        try:
            return await asked.future
        except asyncio.CancelledError:
            self._abort([asked])
            raise

    async def load(self, update: Update) -> None:
        """Take over the update's version after the step in progress (and the running sequences, if they may not be
        interrupted) and `apply` seconds."""
        loop = asyncio.get_running_loop()
        self._advance()
        applied = loop.create_future()
        self._loads.append((update, loop.time(), applied))
        self._advance()
        await applied

    def abort(self, requests: Iterable[str]) -> None:
        """End the named requests now; their callers get the tokens of all complete steps, with finish "abort"."""
        names = set(requests)
        self._abort([request for request in [*self._running, *self._waiting] if request.name in names])

    def _abort(self, requests: list[_Request]) -> None:
        self._advance()
        for request in requests:
            if request in self._running or request in self._waiting:
                self._end(request, "abort")
        self._advance()

    def stats(self) -> dict[str, float]:
        """Running totals in simulated time, and `running`, `waiting` as of now. See `TorchEngine.stats`."""
        return {**self._totals, "running": float(len(self._running)), "waiting": float(len(self._waiting))}

    def progress(self) -> dict[str, int]:
        """Tokens so far of each request that runs, by name; calls of one name add up."""
        self._advance()
        found: dict[str, int] = {}
        for request in self._running:
            found[request.name] = found.get(request.name, 0) + self._steps - request.first
        return found

    async def close(self) -> None:
        """Every caller gets its partial completion with finish "abort"; updates on their way count as applied."""
        self._closed = True
        self._abort([*self._running, *self._waiting])
        for update, _, applied in self._loads:
            self.version, self.digest = update.version, update.digest
            self._applied.append((0.0, applied))
        self._loads.clear()
        for _, applied in self._applied:
            if not applied.done():
                applied.set_result(None)
        self._applied.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _step_seconds(self) -> float:
        return self._base + self._per_sequence * len(self._running)

    def _advance(self) -> None:
        """Move the decode clock through every event up to now, answer callers, set the timer for the next event."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._next_boundary() <= now:
            self._run_steps(self._steps_to_boundary())
            self._at_boundary()
        if self._running:
            self._run_steps(max(0, int((now - self._clock) / self._step_seconds())))
        while self._applied and self._applied[0][0] <= now:
            applied = self._applied.popleft()[1]
            if not applied.done():
                applied.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        due = min(self._next_boundary(), self._applied[0][0] if self._applied else math.inf)
        self._timer = None if due == math.inf else loop.call_at(due, self._advance)

    def _steps_to_boundary(self) -> int:
        """Steps until something may happen: the next sequence ends, or the step that holds up a joiner or an update."""
        if not self._running:
            return 0
        if (self._loads and self._interruptible) or (self._may_join() and self._waiting):
            return 1 if self._clock < self._first_arrival() else 0
        return self._ends[0][0] - self._steps

    def _may_join(self) -> bool:
        return not self._loads and len(self._running) < self.slots

    def _first_arrival(self) -> float:
        return self._loads[0][1] if self._loads else self._waiting[0].arrival

    def _next_boundary(self) -> float:
        """Time of the next event; infinity if there is nothing to do."""
        if self._running:
            return self._clock + self._steps_to_boundary() * self._step_seconds()
        if self._loads or self._waiting:
            return max(self._clock, self._first_arrival())
        return math.inf

    def _run_steps(self, count: int) -> None:
        seconds = count * self._step_seconds()
        self._steps += count
        self._clock += seconds
        self._totals["tokens"] += count * len(self._running)
        self._totals["busy_seconds"] += seconds

    def _at_boundary(self) -> None:
        """Between two steps: answer the sequences that are complete, apply one update, let waiting ones join."""
        while self._ends and self._ends[0][0] <= self._steps:
            request = self._ends[0][2]
            self._end(request, "stop" if request.stops else "length")
        if self._loads and (self._interruptible or not self._running):
            if not self._running:
                self._clock = max(self._clock, self._loads[0][1])
            if self._loads[0][1] <= self._clock:
                self._apply(*self._loads.popleft())
        while self._waiting and self._may_join():
            if not self._running:
                self._clock = max(self._clock, self._waiting[0].arrival)
            if self._waiting[0].arrival > self._clock:
                break
            self._join(self._waiting.popleft())

    def _join(self, request: _Request) -> None:
        request.first = request.run_start = self._steps
        request.last = self._steps + request.length
        self._running[request] = None
        heapq.heappush(self._ends, (request.last, next(self._order), request))
        self._totals["joins"] += 1

    def _apply(self, update: Update, _: float, applied: asyncio.Future[None]) -> None:
        for request in self._running:
            self._end_run(request)
        self.version, self.digest = update.version, update.digest
        recompute = self._step_seconds() if self._recompute and self._running else 0.0
        self._applied.append((self._clock + self._apply_seconds, applied))
        self._clock += self._apply_seconds + recompute
        self._totals["updates"] += 1
        self._totals["apply_seconds"] += self._apply_seconds
        self._totals["pause_seconds"] += self._apply_seconds if self._running else 0.0
        self._totals["pauses"] += bool(self._running)
        self._totals["recompute_seconds"] += recompute

    def _end_run(self, request: _Request) -> None:
        count = self._steps - request.run_start
        if count:
            request.runs.append((self.version, count))
            request.run_start = self._steps

    def _end(self, request: _Request, finish: Finish) -> None:
        count = 0
        if request in self._running:
            self._end_run(request)
            count = self._steps - request.first
            del self._running[request]
            if self._ends[0][2] is request:
                heapq.heappop(self._ends)
            else:
                self._ends = [entry for entry in self._ends if entry[2] is not request]
                heapq.heapify(self._ends)
        else:
            self._waiting.remove(request)
        if not request.future.done():
            tokens = _tokens(request.limits, count, finish)
            request.future.set_result(Completion(tokens, np.full(count, -1.0, np.float32), request.runs, finish))


def _uniform(key: int) -> float:
    return float(uniforms(np.array([key], np.uint64), np.zeros(1, np.int64))[0])


def _normal(key: int) -> float:
    return _NORMAL.inv_cdf(max(_uniform(key), 2.0**-53))


_spread = lru_cache(4096)(_normal)
"""That of a prompt, which has many samples."""


def _tokens(limits: Limits, count: int, finish: Finish) -> np.ndarray:
    """`count` made-up ids, int32; a stop token, where there is one, only at the end of a response that stops."""
    ids = np.array([i for i in range(_TOKEN_IDS + len(limits.stop)) if i not in limits.stop][:_TOKEN_IDS], np.int32)
    keys = np.full(count, limits.key, np.uint64)
    tokens = ids[(uniforms(keys, limits.offset + np.arange(count)) * len(ids)).astype(np.int64)]
    if finish == "stop" and limits.stop:
        tokens[-1] = limits.stop[0]
    return tokens


def _read_trace(path: str) -> list[int]:
    text = Path(path).read_text()
    numbers = json.loads(text) if text.lstrip().startswith("[") else text.split()
    lengths = [int(number) for number in numbers]
    if not lengths:
        raise ValueError(f"trace: no lengths in {path!r}")
    return lengths
