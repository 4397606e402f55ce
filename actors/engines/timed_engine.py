"""The timed engine: takes the time of an accelerator (`actors.engines.decode_clock`), without a model. A busy event
loop delays the answers, never the simulated accelerator."""

import asyncio
import math
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Literal

import numpy as np

from actors.engines.decode_clock import AnswerLengths, DecodeClock, DecodeCost, Load, TimedRequest
from areal_like.sampling import digest_of, uniforms
from areal_like.types import Completion, Finish, Limits
from areal_like.weights.replica import Update

_TOKEN_IDS = 8
"""Made-up responses use the ids 0..7, stop tokens excepted."""


class TimedEngine:
    """A `RolloutEngine` (see `areal_like.interfaces`) that decodes made-up tokens in the time that real ones take.

    `base`, `per_sequence`, `per_token`: seconds of a decode step, of each sequence in it, and of each token that these
    hold; `prefill`: of a prompt's token. `median`, `sigma`, `noise`, `seed`: lengths of answers (`AnswerLengths`);
    `limits.max_tokens` caps them. `apply`: seconds of a weight update. `kv_policy` "recompute" adds the time of one
    decode step; "keep" adds none. `interruptible` False: an update waits for the running sequences.
    """

    def __init__(  # noqa: PLR0913 (each is a knob)
        self,
        *,
        base: Annotated[float, "(0, inf)"] = 0.001,
        per_sequence: Annotated[float, "[0, inf)"] = 0.0,
        per_token: Annotated[float, "[0, inf)"] = 0.0,
        prefill: Annotated[float, "[0, inf)"] = 0.0,
        slots: Annotated[int, "[1, inf)"] = 64,
        median: Annotated[float, "(0, inf)"] = 100.0,
        sigma: Annotated[float, "[0, inf)"] = 1.0,
        noise: Annotated[float, "[0, inf)"] = 0.3,
        seed: Annotated[int, "[0, inf)"] = 0,
        apply: Annotated[float, "[0, inf)"] = 0.0,
        kv_policy: Literal["recompute", "keep"] = "recompute",
        interruptible: bool = True,
    ):
        self.version, self.digest, self.slots = 0, "", slots
        cost = DecodeCost(base, per_sequence, per_token, prefill, apply, kv_policy == "recompute")
        self._clock = DecodeClock(cost, slots, interruptible=interruptible)
        self._lengths = AnswerLengths(median, sigma, noise, seed)
        self._calls: dict[TimedRequest, tuple[Limits, asyncio.Future[Completion]]] = {}
        self._loading: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def length(self, tokens: np.ndarray, limits: Limits) -> int:
        """Tokens that this sample gets, `limits.max_tokens` aside. The prompt's last `limits.offset` are its own."""
        own = limits.offset if limits.offset < len(tokens) else 0
        return max(1, self._lengths.of(digest_of(tokens[: len(tokens) - own]), limits.key) - limits.offset)

    async def generate(self, tokens: np.ndarray, limits: Limits, request: str = "") -> Completion:
        """Wait for as long as decoding takes. Cancelling the caller frees the slot."""
        loop, wanted = asyncio.get_running_loop(), self.length(tokens, limits)
        length, stops = min(wanted, limits.max_tokens), wanted <= limits.max_tokens
        call = TimedRequest(request, length, stops, loop.time(), self._answer, len(tokens))
        future = loop.create_future()
        if not self._clock.waiting:
            self._advance()
            loop.call_soon(self._advance)  # once for all that come in this turn of the loop
        self._calls[call] = limits, future
        self._clock.waiting.append(call)
        try:
            return await future
        except asyncio.CancelledError:
            self._abort([call])
            raise

    def _answer(self, call: TimedRequest, finish: Finish) -> None:
        limits, future = self._calls.pop(call)
        if not future.done():
            tokens = _tokens(limits, call.made, finish)
            future.set_result(Completion(tokens, np.full(call.made, -1.0, np.float32), call.runs, finish))

    async def load(self, update: Update) -> None:
        """Take over the update's version after the step in progress and `apply` seconds."""
        loop = asyncio.get_running_loop()
        applied = loop.create_future()
        self._loading.add(applied)
        self._advance()
        self._clock.load(Load(update.version, loop.time(), partial(self._loaded, update, applied)))
        self._advance()
        await applied

    def _loaded(self, update: Update, applied: asyncio.Future[None]) -> None:
        self.version, self.digest = update.version, update.digest
        self._loading.discard(applied)
        if not applied.done():
            applied.set_result(None)

    def abort(self, requests: Iterable[str]) -> None:
        names = set(requests)
        self._abort([call for call in self._calls if call.name in names])

    def _abort(self, calls: list[TimedRequest]) -> None:
        self._clock.abort(calls, asyncio.get_running_loop().time())
        self._advance()

    def stats(self) -> dict[str, float]:
        """Running totals in simulated time, and `running`, `waiting` as of now. See `TorchEngine.stats`."""
        self._advance()
        clock = self._clock
        return {**clock.totals, "running": float(len(clock.running)), "waiting": float(len(clock.waiting))}

    def progress(self) -> dict[str, int]:
        self._advance()
        found: dict[str, int] = {}
        for call in self._clock.running:
            found[call.name] = found.get(call.name, 0) + call.made + self._clock.steps - call.begin
        return found

    async def close(self) -> None:
        """Every caller gets its partial completion with finish "abort"; pending updates count as applied."""
        self._abort(list(self._calls))
        for applied in self._loading:
            applied.set_result(None)
        if self._timer is not None:
            self._timer.cancel()

    def _advance(self) -> None:
        loop = asyncio.get_running_loop()
        self._clock.advance(loop.time())
        if self._timer is not None:
            self._timer.cancel()
        due = self._clock.due()
        self._timer = None if due == math.inf else loop.call_at(due, self._advance)


def _tokens(limits: Limits, count: int, finish: Finish) -> np.ndarray:
    """`count` made-up ids, int32; a stop token, where there is one, only at the end of a response that stops."""
    ids = np.array([i for i in range(_TOKEN_IDS + len(limits.stop)) if i not in limits.stop][:_TOKEN_IDS], np.int32)
    keys = np.full(count, limits.key, np.uint64)
    tokens = ids[(uniforms(keys, limits.offset + np.arange(count)) * len(ids)).astype(np.int64)]
    if finish == "stop" and limits.stop:
        tokens[-1] = limits.stop[0]
    return tokens
