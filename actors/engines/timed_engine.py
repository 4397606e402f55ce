"""A simulated accelerator: no model, a set cost per decode step, lengths from a distribution or a trace. No torch.

Everything around it is real (processes, sockets, buffer, weight updates), so that questions about the system can be
asked on two cores. n running sequences advance together, one token per `base + per_sequence · n` seconds; the clock
of the simulated device is a deadline that is caught up with at every event (a finish, a join, an abort, an update),
so a late wake-up of this process does not slow the device. Continuous batching: at most `slots` sequences run, the
others wait, first in, first out.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

import numpy as np
import xxhash

from areal_like.sampling import stream_key
from areal_like.types import Completion, Finish, Limits, Runs
from areal_like.weights.state import Update

_TOKEN = 1
_LOGPROB = -1.0


@dataclass(slots=True, eq=False)
class _Sequence:
    request: str
    length: int
    finish: Finish
    future: asyncio.Future[Completion]
    done: int = 0
    runs: Runs = field(default_factory=list)

    def advance(self, steps: int, version: int) -> None:
        self.done += steps
        if self.runs and self.runs[-1][0] == version:
            self.runs[-1] = (version, self.runs[-1][1] + steps)
        else:
            self.runs.append((version, steps))

    def answer(self, finish: Finish) -> None:
        if not self.future.done():
            tokens = np.full(self.done, _TOKEN, np.int32)
            logprobs = np.full(self.done, _LOGPROB, np.float32)
            self.future.set_result(Completion(tokens, logprobs, list(self.runs), finish))


class TimedEngine:
    """A `RolloutEngine` (see `areal_like.interfaces`) without a model.

    `base`, `per_sequence`: seconds per decode step. `apply`: seconds that a weight update stops the device for.
    A sequence's length is `median · exp(sigma · z_prompt) · exp(noise · z_sample)` tokens, z standard normal and keyed
    by the prompt's tokens and by `Limits.key`; or, with a `trace` (numbers, or a JSON file of them), the trace's
    entry that the same key picks. `Limits.max_tokens` cuts it. `interruptible` False: an update waits for the
    running sequences. Raises ValueError for a knob out of range, OSError for a trace that can't be read.
    """

    def __init__(  # noqa: PLR0913 - a component's knobs are its keyword-only parameters
        self,
        *,
        base: float = 0.001,
        per_sequence: float = 0.0,
        apply: float = 0.0,
        slots: int = 64,
        median: float = 100.0,
        sigma: float = 1.0,
        noise: float = 0.3,
        trace: str | Sequence[int] | None = None,
        interruptible: bool = True,
    ):
        if slots < 1 or median <= 0 or min(base, per_sequence, apply, sigma, noise) < 0 or base + per_sequence <= 0:
            raise ValueError("timed engine: slots and median must be positive, costs and spreads must not be negative")
        self.version, self.digest, self.slots = 0, "", slots
        self._base, self._per_sequence, self._apply_cost = base, per_sequence, apply
        self._median, self._sigma, self._noise = median, sigma, noise
        self._trace = json.loads(Path(trace).read_text()) if isinstance(trace, str) else trace
        self._interruptible = interruptible
        self._running: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._drained: asyncio.Event | None = None  # set once nothing runs; there while an update waits for that
        self._at = 0.0  # the device has computed everything up to this moment
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._totals = dict.fromkeys(
            ("tokens", "joins", "updates", "busy_seconds", "apply_seconds", "pause_seconds", "paused_apply_seconds"), 0.0
        )

    # ---- the interface ----------------------------------------------------------------------------------------------

    async def generate(self, tokens: np.ndarray, limits: Limits, request: str = "") -> Completion:
        """A completion of the drawn length, when the simulated device is done with it."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        length = self._length(tokens, limits)
        finish: Finish = "length" if length > limits.max_tokens else "stop"
        sequence = _Sequence(request, min(length, limits.max_tokens), finish, asyncio.get_running_loop().create_future())
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="timed engine")
        self._catch_up()
        if not self._running:
            self._at = max(self._at, time.monotonic())  # a device that stood still starts now
        self._waiting.append(sequence)
        self._admit()
        self._wake.set()
        try:
            return await sequence.future
        except asyncio.CancelledError:
            self._remove([sequence])
            raise

    async def load(self, update: Update) -> None:
        """Every later token is of the new version. The device stands still for `apply` seconds."""
        self._catch_up()
        if not self._interruptible and self._running:
            drained = self._drained = asyncio.Event()
            await drained.wait()
        self.version, self.digest = update.version, update.digest
        self._totals["updates"] += 1
        self._totals["apply_seconds"] += self._apply_cost
        if self._running:
            self._totals["pause_seconds"] += self._apply_cost
            self._totals["paused_apply_seconds"] += self._apply_cost
        now = time.monotonic()
        self._at = max(self._at, now) + self._apply_cost
        await asyncio.sleep(self._apply_cost)
        self._drained = None
        self._admit()
        self._wake.set()

    def abort(self, requests: Iterable[str]) -> None:
        """Cut the named requests now; their callers get what there is."""
        names = set(requests)
        self._catch_up()
        cut = [each for each in (*self._running, *self._waiting) if each.request in names]
        self._remove(cut)
        for each in cut:
            each.answer("abort")

    def stats(self) -> dict[str, float]:
        """Running totals as in `areal_like.interfaces`, and `running`, `waiting` as of now."""
        return {**self._totals, "running": float(len(self._running)), "waiting": float(len(self._waiting))}

    async def close(self) -> None:
        self._closed = True
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for each in (*self._running, *self._waiting):
            each.answer("abort")
        self._running, self._waiting = [], deque()

    # ---- the device -------------------------------------------------------------------------------------------------

    def _length(self, tokens: np.ndarray, limits: Limits) -> int:
        prompt = xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, np.int32).tobytes())
        if self._trace is not None:
            return max(1, int(self._trace[stream_key(prompt, limits.key) % len(self._trace)]))
        spread = self._sigma * _normal(stream_key(prompt)) + self._noise * _normal(stream_key(limits.key, limits.offset))
        return max(1, round(self._median * math.exp(spread)))

    def _cost(self) -> float:
        return self._base + self._per_sequence * len(self._running)

    def _catch_up(self) -> None:
        """Compute all whole decode steps that fit between `_at` and now, with the finishes and joins in between."""
        now = time.monotonic()
        while self._running:
            cost, to_finish = self._cost(), min(each.length - each.done for each in self._running)
            steps = min(to_finish, math.floor((now - self._at) / cost + 1e-9))
            if steps <= 0:
                return
            for each in self._running:
                each.advance(steps, self.version)
            self._at += steps * cost
            self._totals["tokens"] += steps * len(self._running)
            self._totals["busy_seconds"] += steps * cost
            if steps == to_finish:
                ended = [each for each in self._running if each.done == each.length]
                self._remove(ended)
                for each in ended:
                    each.answer(each.finish)

    def _admit(self) -> None:
        """Fill free slots, from the moment that the device has reached."""
        while self._waiting and len(self._running) < self.slots and self._drained is None:
            self._running.append(self._waiting.popleft())
            self._totals["joins"] += 1

    def _remove(self, sequences: list[_Sequence]) -> None:
        for each in sequences:
            if each in self._running:
                self._running.remove(each)
            elif each in self._waiting:
                self._waiting.remove(each)
        if not self._running and self._drained:
            self._drained.set()
        self._admit()

    async def _run(self) -> None:
        """Wake up when the next sequence ends; unblocked early by a join or an update."""
        while True:
            self._catch_up()
            self._wake.clear()
            if not self._running:
                await self._wake.wait()
                continue
            steps = min(each.length - each.done for each in self._running)
            seconds = self._at + steps * self._cost() - time.monotonic()
            if seconds > 0:
                try:
                    await asyncio.wait_for(self._wake.wait(), seconds)
                except TimeoutError:
                    continue


def _normal(key: int) -> float:
    """A standard normal number from a key."""
    uniform = ((key >> 11) + 0.5) * 2.0**-53
    return NormalDist().inv_cdf(uniform)
