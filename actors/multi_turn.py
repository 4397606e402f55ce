"""The workflow of several turns: the model acts, an environment answers within time limits, and answers are checked."""

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import numpy as np

from actors import measures
from actors.transcript import Transcript, rewrites
from areal_like.config.registry import build
from areal_like.errors import EpisodeError
from areal_like.interfaces import Codec, Outcome, RewardFunction, RolloutEngine
from areal_like.tasks.chat import parted
from areal_like.types import Finish, Limits, Prompt, Sample

_TOLD_CHARACTERS = 300
MOST_CHARACTERS = 1 << 20
CHARACTERS_PER_TOKEN = 64


def most_characters(room: int) -> int:
    """Most characters of an encoded text, for responses of `room` tokens: longer ones would block the actor."""
    return max(MOST_CHARACTERS, CHARACTERS_PER_TOKEN * room)


async def multi_turn(
    engine: RolloutEngine,
    reward: RewardFunction,
    prompt: Prompt,
    limits: Limits,
    request: str,
    *,
    environment: Mapping[str, Any],
    max_turns: Annotated[int, "[1, inf)"] = 8,
    timeout: Annotated[float, "(0, 1e7]"] = 120.0,
) -> Sample | None:
    """One trajectory of many turns: the model acts, the environment answers, until it ends the episode.

    `environment` names an `Environment`, e.g. `{name: tools, tools: [calculator]}`. What it shows becomes loss-masked
    tokens of the response; the prompt's codec turns text into tokens, and the model's own tokens are never encoded
    again, unless the chat template rewrites its turns: then the sample forks (`Sample.forks`). `limits.max_tokens`
    bounds the response, answers of the environment included. A call of the environment that waits for more than
    `timeout` seconds raises EpisodeError.

    The sample's reward is the sum over its turns (`Sample.turn_rewards`); a turn without its own reward earns what
    the task's verifier gives for its tokens. An episode that still runs after `max_turns`, or when the tokens are used
    up, ends with finish "length" and its reward so far. None where a turn was aborted.
    """
    if prompt.codec is None:
        raise ValueError("multi_turn needs a task with text (Prompt.codec): jsonl, copy, or your own")
    scene = Scene(environment, timeout, limits.max_tokens)
    await scene.build()
    try:
        talk, first = _opening(prompt, await scene.reset(prompt))
        transcript = Transcript(first, limits)
        finish: Finish = "length"
        for turn in range(max_turns):
            action = await engine.generate(transcript.tokens, transcript.limits(), request)
            if action.finish == "abort":
                return None
            transcript.said(action)
            said = prompt.codec.decode(action.tokens)
            outcome = await scene.step(said)
            asked = for_answer(prompt, begun="") if turn else prompt
            transcript.earned(await reward(asked, action.tokens) if outcome.reward is None else outcome.reward)
            if outcome.done:
                finish = action.finish
                break
            talk, begun = parted(talk)
            talk += [{"role": "assistant", "content": begun + said}, {"role": "user", "content": outcome.observation}]
            stretch = replace(limits, offset=limits.offset + (turn + 1) * limits.max_tokens)
            closed = action.finish == "stop" and int(action.tokens[-1])
            if turn + 1 == max_turns or not _show(transcript, prompt.codec, talk, stretch, closed):
                break
    finally:
        await scene.close()
    sample = transcript.sample(None, finish)
    if limits.trained:
        calls, errors = getattr(scene.world, "tool_calls", 0), getattr(scene.world, "tool_errors", 0)
        measures.note_turns(sample, transcript.turns, calls, errors)
    return sample


def for_answer(prompt: Prompt, begun: str) -> Prompt:
    """The prompt for the verifier of an answer that continues the text `begun`, of its own message. The prompt's last
    message may have begun another one."""
    before, own = parted(prompt.messages)
    if begun == own:
        return prompt
    talk = [*before, {"role": "assistant", "content": begun}] if begun else before
    return replace(prompt, tokens=prompt.codec.opening(talk), messages=tuple(talk))


def _opening(prompt: Prompt, shown: str) -> tuple[list[dict[str, str]], np.ndarray]:
    """The prompt's messages, with what the environment shows at the end of the last one, and their tokens, int32 [P].
    Raises ValueError."""
    if not shown:
        return [*prompt.messages], prompt.tokens
    if not prompt.messages:
        raise ValueError(
            "the environment shows something first, and the prompt has no message for it (Prompt.messages)"
        )
    talk, begun = parted(prompt.messages)
    talk[-1] = talk[-1] | {"content": talk[-1]["content"] + shown}
    talk += [{"role": "assistant", "content": begun}] if begun else []
    return talk, prompt.codec.opening(talk)


def _show(transcript: Transcript, codec: Codec, talk: list[dict[str, str]], stretch: Limits, closed: int) -> bool:
    """Show the model the last message of a conversation; False where no room is left for an answer. `stretch`: the
    limits, from a place in the sample's random numbers that no other turn uses."""
    said, shown = talk[-2:]
    if rewrites(codec, said["content"], [shown]):
        again = codec.opening(talk)
        if fits := transcript.fits(again):
            transcript.forked(again, stretch)
        return fits
    answer = codec.reply(shown["content"], closed=closed)
    if fits := len(answer) < transcript.room:
        transcript.shown(answer)
    return fits


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
