"""Counts one sample's calls to the engine and the verifier, and can end them.

The worker gives each workflow a `Recorder` in place of the engine."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from areal_like.interfaces import RewardFunction, RolloutEngine
from areal_like.types import Completion, Limits, Prompt


def limited(engine: Any) -> AbstractContextManager[None]:
    """`Recorder.limited` for workflows, whose engine is a Recorder unless somebody calls them directly."""
    return engine.limited() if isinstance(engine, Recorder) else nullcontext()


class Recorder:
    """`engine` and `verifier` as one sample sees them. After `close` no more tokens are sampled. `tokens` and `answers`
    (of either) have come here: see `actors.progress`; `cut`: a call was aborted; `ended`: the sample came to its end.
    `parts`: sums of those of the rewards."""

    def __init__(self, engine: RolloutEngine, verifier: RewardFunction):
        self.engine, self.verifier = engine, verifier
        self.tokens = self.answers = 0
        self.cut = self.ended = False
        self.parts: dict[str, float] = {}
        self._closed = False
        self._open = self._limited = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, tokens: np.ndarray, limits: Limits, request: str = "") -> Completion:
        """As the engine's; ends with finish "abort" at once when closed."""
        if self._closed:
            self.cut = True
            return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), [], "abort")
        self._open += 1
        self._idle.clear()
        try:
            done = await self.engine.generate(tokens, limits, request)
            self.tokens, self.answers = self.tokens + len(done.tokens), self.answers + 1
            self.cut |= done.finish == "abort"
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()
        return done

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        """As the verifier's."""
        with self.limited():
            score = await self.verifier(prompt, tokens)
        self.answers += 1
        for name, part in (getattr(score, "parts", None) or {}).items():
            self.parts[name] = self.parts.get(name, 0.0) + part
        return float(score)

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Code inside has its own time limit: the sample counts as working without new tokens."""
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
