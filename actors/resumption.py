"""Records one sample's calls to the engine and the verifier, so that another actor can continue it.

The worker gives each workflow a `Recorder` in place of the engine. If an earlier lease has recorded a call, the answer
comes from that record. An interrupted call continues at its next token, in the same stream of random numbers
(`Limits.offset`): one completion made by several versions, as after an update in flight."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from areal_like.interfaces import RewardFunction, RolloutEngine
from areal_like.models.experts import joined_experts
from areal_like.partial import PartialSample
from areal_like.types import Completion, Limits, Prompt, Runs
from areal_like.wire.groups import digest_of


def merged(runs: Runs) -> Runs:
    """Join neighbouring runs of the same version."""
    return [(version, sum(count for _, count in each)) for version, each in groupby(runs, key=itemgetter(0))]


def limited(engine: Any) -> AbstractContextManager[None]:
    """`Recorder.limited` for workflows, whose engine is a Recorder unless somebody calls them directly."""
    return engine.limited() if isinstance(engine, Recorder) else nullcontext()


class Recorder:
    """`engine` and `verifier` as one sample sees them; `record` holds their answers, some from an earlier lease. After
    `close` no more tokens are sampled. `tokens` and `answers` (of either) have come here: see `actors.progress`.
    `parts`: sums of those of the rewards."""

    def __init__(self, engine: RolloutEngine, verifier: RewardFunction, record: PartialSample):
        self.engine, self.verifier, self.record = engine, verifier, record
        self.tokens = self.answers = 0
        self.parts: dict[str, float] = {}
        self._closed = False
        self._open = self._limited = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, tokens: np.ndarray, limits: Limits, request: str = "") -> Completion:
        """As the engine's; ends with finish "abort" at once when closed."""
        key = (digest_of(tokens), limits.offset)
        before = self.record.calls.get(key)
        if before and before.finish != "abort":
            return before
        if self._closed:
            return before or Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), [], "abort")
        self._open += 1
        self._idle.clear()
        try:
            self.record.calls[key] = done = await self._go_on(before, tokens, limits, request)
            self.tokens, self.answers = self.tokens + len(done.tokens), self.answers + 1
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()
        return done

    async def _go_on(self, before: Completion | None, tokens: np.ndarray, limits: Limits, request: str) -> Completion:
        if before is None:
            return await self.engine.generate(tokens, limits, request)
        done = len(before.tokens)
        known = 0 if before.experts is None or not done else len(before.experts)
        rest = replace(
            limits,
            max_tokens=limits.max_tokens - done,
            offset=limits.offset + done,
            experts_from=limits.experts_from + known,
            begun=limits.begun + done,
        )
        after = await self.engine.generate(np.concatenate([tokens, before.tokens]), rest, request)
        return Completion(
            np.concatenate([before.tokens, after.tokens]),
            np.concatenate([before.logprobs, after.logprobs]),
            merged(before.runs + after.runs),
            after.finish,
            joined_experts([each.experts for each in (before, after) if len(each.tokens)]),
        )

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        """As the verifier's; a response that was scored before is not scored again."""
        key = digest_of(tokens)
        if key not in self.record.scores:
            with self.limited():
                score = await self.verifier(prompt, tokens)
            self.record.scores[key] = float(score)
            if parts := getattr(score, "parts", None):
                self.record.parts[key] = dict(parts)
            self.answers += 1
        for name, part in self.record.parts.get(key, {}).items():
            self.parts[name] = self.parts.get(name, 0.0) + part
        return self.record.scores[key]

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Code inside has a time limit of its own: the sample counts as alive without new tokens."""
        self._limited += 1
        try:
            yield
        finally:
            self._limited -= 1

    @property
    def waits_for_engine(self) -> bool:
        return self._open > 0

    @property
    def is_limited(self) -> bool:
        return self._limited > 0

    def close(self) -> None:
        self._closed = True

    async def idle(self) -> None:
        await self._idle.wait()
