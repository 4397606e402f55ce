"""The workflow of several turns: the model acts, an environment answers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import numpy as np

from actors import measures
from actors.scene import Scene
from actors.transcript import Transcript, rewrites
from areal_like.interfaces import Codec, RewardFunction, RolloutEngine
from areal_like.types import Finish, Limits, Prompt, Sample


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
            transcript.earned(await reward(prompt, action.tokens) if outcome.reward is None else outcome.reward)
            if outcome.done:
                finish = action.finish
                break
            talk += [{"role": "assistant", "content": said}, {"role": "user", "content": outcome.observation}]
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


def _opening(prompt: Prompt, shown: str) -> tuple[list[dict[str, str]], np.ndarray]:
    """The prompt's messages, with what the environment shows at the end of the last one, and their tokens, int32 [P].
    Raises ValueError."""
    if not shown:
        return [*prompt.messages], prompt.tokens
    if not prompt.messages:
        raise ValueError(
            "the environment shows something first, and the prompt has no message for it (Prompt.messages)"
        )
    *before, last = prompt.messages
    talk = [*before, last | {"content": last["content"] + shown}]
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
