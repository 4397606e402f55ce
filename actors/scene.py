"""An environment as a workflow sees it: with time limits and checked answers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from actors.environments.errors import EpisodeError
from actors.resumption import limited
from actors.time_limit import Breathing, Overtime, within
from areal_like.config.registry import build
from areal_like.interfaces import RolloutEngine
from areal_like.types import Outcome, Prompt

BUSY_SECONDS = 15.0
"""Most seconds from one await of an environment to the next, or of a whole call that is not async. Meanwhile the actor
stands still; after twice that it counts as dead (`buffer.heartbeat_timeout`)."""
_TOLD_CHARACTERS = 300
MOST_CHARACTERS = 1 << 20
CHARACTERS_PER_TOKEN = 64

_in_turn = Breathing()


def most_characters(room: int) -> int:
    """Of what the model is shown at a time, where the longest response has `room` tokens: `MOST_CHARACTERS`, or
    `CHARACTERS_PER_TOKEN` of them all, if that is more. A longer text, which no model reads, is not encoded: that would
    stop the whole actor for seconds."""
    return max(MOST_CHARACTERS, CHARACTERS_PER_TOKEN * room)


class Scene:
    """One episode of the environment that `spec` names. Each of its calls may take `timeout` seconds, unless it says
    that it has limits of its own (`Environment.limited`). `room`: the longest response, in tokens."""

    def __init__(self, engine: RolloutEngine, spec: Mapping[str, Any], timeout: float, room: int):
        self._engine, self._spec, self._seconds = engine, spec, timeout
        self._most = most_characters(room)
        self._waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self.world: Any = None

    async def build(self) -> None:
        """Make the environment. Raises EpisodeError (it takes too long, or exits), as the others do, and what the
        environment raises."""
        self.world = await self._heard("constructor")
        if getattr(self.world, "limited", False):
            self._seconds, self._waiting = math.inf, partial(limited, self._engine)

    async def reset(self, prompt: Prompt) -> str:
        """What is shown first. Raises TypeError for what is no text."""
        shown = await self._heard("reset", prompt)
        return self._text("reset", "" if shown is None else shown)

    async def step(self, action: str) -> Outcome:
        """Raises TypeError for an answer that is none."""
        answer = await self._heard("step", action)
        try:
            shown, reward, done = answer
            earned = None if reward is None else float(reward)
        except (TypeError, ValueError):
            raise TypeError(
                "the environment's step must return (observation, reward, done): a text, a number or None, and a bool; "
                f"it has returned {answer!r}"[:_TOLD_CHARACTERS]
            ) from None
        return Outcome(self._text("step", shown), earned, bool(done))

    async def close(self) -> None:
        if not hasattr(self.world, "close"):
            return
        try:
            with self._waiting():
                await within(self._seconds, BUSY_SECONDS, self._called("close"))
        except Overtime as error:
            raise EpisodeError(f"the environment's close: {error}") from None

    async def _heard(self, name: str, *arguments: object) -> Any:
        try:
            with self._waiting():
                return await _in_turn.within(self._seconds, BUSY_SECONDS, partial(self._called, name, *arguments))
        except Overtime as error:
            raise EpisodeError(f"the environment's {name}: {error}") from None

    async def _called(self, name: str, *arguments: object) -> Any:
        try:
            if self.world is None:
                return build("environment", self._spec)
            answer = getattr(self.world, name)(*arguments)
            return await answer if inspect.isawaitable(answer) else answer
        except SystemExit as error:  # must not be the actor's end
            raise EpisodeError(f"the environment's {name} exits: {error!r}") from error

    def _text(self, name: str, shown: object) -> str:
        if not isinstance(shown, str):
            raise TypeError(f"the environment's {name} must show a text, and shows {shown!r}"[:_TOLD_CHARACTERS])
        if len(shown) > self._most:
            raise EpisodeError(
                f"the environment's {name} shows {len(shown):,} characters, more than any model reads: at most "
                f"{self._most:,} are encoded; show less"
            )
        return shown
