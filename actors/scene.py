"""An environment as a workflow sees it: with time limits and checked answers."""

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from areal_like.config.registry import build
from areal_like.errors import EpisodeError
from areal_like.interfaces import Outcome
from areal_like.types import Prompt

_TOLD_CHARACTERS = 300
MOST_CHARACTERS = 1 << 20
CHARACTERS_PER_TOKEN = 64


def most_characters(room: int) -> int:
    """Most characters of an encoded text, for responses of `room` tokens: longer ones would block the actor."""
    return max(MOST_CHARACTERS, CHARACTERS_PER_TOKEN * room)


class Scene:
    """One episode of the environment `spec`. A call may take `timeout` seconds. `room`: most tokens of a response."""

    def __init__(self, spec: Mapping[str, Any], timeout: float, room: int):
        self._spec, self._seconds = spec, timeout
        self._most = most_characters(room)
        self.world: Any = None

    async def build(self) -> None:
        """Make the environment. Raises EpisodeError (it takes too long, or exits), as the others do."""
        self.world = await self._call("constructor")

    async def reset(self, prompt: Prompt) -> str:
        """The text that is shown first. Raises TypeError for an answer that is no text."""
        shown = await self._call("reset", prompt)
        return self._text("reset", "" if shown is None else shown)

    async def step(self, action: str) -> Outcome:
        """Raises TypeError for an answer that is none."""
        answer = await self._call("step", action)
        try:
            shown, reward, done = answer
            earned = None if reward is None else float(reward)
        except (TypeError, ValueError):
            wanted = "(observation, reward, done): a text, a number or None, and a bool"
            raise TypeError(f"environment.step: got {answer!r}, expected {wanted}"[:_TOLD_CHARACTERS]) from None
        return Outcome(self._text("step", shown), earned, bool(done))

    async def close(self) -> None:
        if hasattr(self.world, "close"):
            await self._call("close")

    async def _call(self, name: str, *arguments: object) -> Any:
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                if self.world is None:
                    return build("environment", self._spec)
                answer = getattr(self.world, name)(*arguments)
                return await answer if inspect.isawaitable(answer) else answer
        except SystemExit as error:  # must not be the actor's end
            raise EpisodeError(f"the environment's {name} exits: {error!r}") from error
        except TimeoutError:
            if not limit.expired():
                raise
            raise EpisodeError(f"the environment's {name} took more than {self._seconds:g} s") from None

    def _text(self, name: str, shown: object) -> str:
        if not isinstance(shown, str):
            raise TypeError(f"environment.{name}: got {shown!r}, expected a text to show"[:_TOLD_CHARACTERS])
        if len(shown) > self._most:
            raise EpisodeError(f"environment.{name}: got {len(shown):,} characters, expected at most {self._most:,}")
        return shown
