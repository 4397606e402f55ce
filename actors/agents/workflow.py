"""The workflow `agent`: the user's own program talks to an OpenAI-compatible endpoint, and its traffic is the rollout.

sample → conversation, with a key ──► the agent, told base URL, key and row ──► requests ──► engine
       ◄── the path to the last turn, as one trajectory ◄── reward: the agent's, or the verifier's of the last turn
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np

from actors import measures
from actors.agents.chat import Terms
from actors.agents.conversation import Conversation
from actors.agents.endpoint import endpoint
from actors.agents.programs import AgentError, Reward, play
from actors.measures import AGENTS
from actors.multi_turn import for_answer
from actors.recorder import limited
from areal_like.interfaces import RewardFunction, RolloutEngine
from areal_like.types import Limits, Prompt, Sample

log = logging.getLogger(__name__)
END_SECONDS = 2.0
"""Seconds that an async function has to end when it is cancelled."""


async def agent(  # noqa: PLR0913 (some are knobs)
    engine: RolloutEngine,
    reward: RewardFunction,
    prompt: Prompt,
    limits: Limits,
    request: str,
    *,
    agent: str | Sequence[str],
    timeout: Annotated[float, "(0, 1e7]"] = 600.0,
    sampling: Literal["refuse", "ignore"] = "refuse",
    call_marks: Sequence[str] = ("<tool_call>", "</tool_call>"),
) -> Sample | None:
    """One trajectory: the conversation that a program of the user's has with the model (`actors.agents.conversation`).

    `agent`: an async function "module:name", or a command (`actors.agents.programs`); it has `timeout` seconds.
    `sampling`: requests with another temperature than the run's, top-p, penalties and the like would make behaviour
    logprobs differ from the learner's. They are refused, or sampled as the run does ("ignore"; evaluations always do
    so). `call_marks`: around the model's tool calls, as its chat template writes them.

    `limits.max_tokens` bounds the response, shown tokens included. The reward is the agent's: one for the whole, or one
    for each turn; where it gives none, the task's verifier scores the last turn. A sample whose last request found no
    room for an answer ends with finish "length". None where the sample was broken off. Raises AgentError.
    """
    if prompt.codec is None or not hasattr(prompt.codec, "opening"):
        raise ValueError("workflow=agent needs a task whose codec opens conversations (Prompt.codec), e.g. jsonl")
    terms = Terms(limits.temperature, sampling == "ignore" or not limits.trained, (call_marks[0], call_marks[1]))
    conversation = Conversation(engine, prompt.codec, limits, request, terms)
    try:
        with limited(engine):
            earned = await _earned(conversation, agent, prompt, timeout)
        if conversation.aborted:
            return None
        return await _sample(conversation, earned, reward, prompt)
    except AgentError:
        AGENTS["crashes"] += 1
        raise


async def _earned(conversation: Conversation, agent: str | Sequence[str], prompt: Prompt, timeout: float) -> Reward:
    """The agent's result, once it has ended. Raises AgentError, and what the engine raised."""
    answer = prompt.answer.tolist() if isinstance(prompt.answer, np.ndarray) else prompt.answer
    row, server = {"messages": [dict(message) for message in prompt.messages], "answer": answer}, await endpoint()
    with server.serves(conversation) as key:
        try:
            earned = await _until_over(play(agent, server.base_url, key, row), conversation, timeout)
        except AgentError:
            if not conversation.full:
                raise
            return None
    if conversation.failure is not None:
        raise conversation.failure
    return earned


async def _until_over(playing: Coroutine[Any, Any, Reward], conversation: Conversation, timeout: float) -> Reward:
    """What the agent, which then has ended, returns; None if its conversation was over before. Raises AgentError."""
    program = asyncio.ensure_future(playing)
    over = asyncio.ensure_future(conversation.over.wait())
    try:
        await asyncio.wait([program, over], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if conversation.over.is_set():
            return None
        if not program.done():
            raise AgentError(f"the agent has not ended after {timeout:g} s")
        if program.cancelled():  # by itself: this sample has not been
            raise AgentError("the agent was cancelled from within")
        return program.result()
    finally:
        over.cancel()
        conversation.close()
        if not program.done():
            program.cancel()
            if (await asyncio.wait([program], timeout=END_SECONDS))[1]:
                log.error("an agent does not end when it is cancelled: it goes on, without a key")


async def _sample(conversation: Conversation, earned: Reward, reward: RewardFunction, prompt: Prompt) -> Sample:
    last = conversation.last
    if last is None:
        why = f"; a request was refused: {conversation.refusal}" if conversation.refusal else ""
        raise AgentError(f"the agent got no answer{why}")
    transcript, finish = last.transcript, "length" if conversation.full else last.completion.finish
    AGENTS["turns_left_out"] += len(conversation.turns) - transcript.turns
    if isinstance(earned, list):
        try:
            transcript.earned_by_turn(earned)
        except ValueError as error:
            raise AgentError(f"the agent gives {error} of the conversation that is trained") from None
        score = None
    else:
        asked = for_answer(replace(prompt, codec=last.codec), last.begun)
        score = await reward(asked, last.completion.tokens) if earned is None else earned
    sample = transcript.sample(score, finish)
    if transcript.whole.trained:
        calls = sum(len(message.get("tool_calls", ())) for message in last.messages)
        results = (message["content"].lower() for message in last.messages if message["role"] == "tool")
        errors = sum(result.startswith(measures.FAILED) for result in results)
        measures.note_turns(sample, transcript.turns, calls, errors)
    return sample
