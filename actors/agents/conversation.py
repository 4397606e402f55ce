"""The requests of one sample's agent as token-exact conversations: a tree. One of its paths becomes the sample.

Each answered request is a *turn*. A request continues the turn whose messages and answer are the longest beginning of
its own messages; only new messages are encoded, as loss-masked tokens. A request that continues no turn opens a new
conversation: all of its messages are then prompt, also those that claim to be the model's.

    messages of a request    [system, user]    [system, user, answer, tool]    [system, user, answer, user 2]
    what becomes of it       turn 1            turn 2, goes on from 1          turn 3, goes on from 1: a branch

The path to the last turn, by the order of requests, is trained; other turns are only counted. Each branch has its own
part of the sample's stream of random numbers, so a repeated request gets another answer.
"""

import asyncio
import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from actors.agents.chat import Chat, ChatReply, RefusedRequest, Terms, assistant_message, reply_of
from actors.measures import AGENTS
from actors.multi_turn import most_characters
from actors.transcript import Transcript, rewrites
from areal_like.interfaces import Codec, RolloutEngine
from areal_like.stops import with_texts
from areal_like.tasks.chat import parted
from areal_like.types import Completion, Limits

ENDED = "this sample has ended; its key is no longer valid"


@dataclass(eq=False)
class Turn:
    """One answer, and all before it. `messages` end with it, which continues the text `begun` of the request; `codec`
    has its stop texts; `followers` counts the requests that go on from here."""

    number: int
    messages: list[dict[str, Any]]
    tools: list[Any]
    transcript: Transcript
    completion: Completion
    codec: Any
    begun: str
    followers: int = 0


class Conversation:
    """Of the sample `request`, under `limits` of its response. `codec` is its prompt's.

    `over` is set once it can't go on: `aborted` (the sample was broken off) or with a `failure` of the engine. `full`:
    the last request found no room for an answer. `refusal`: why a request was refused, the last time.
    """

    def __init__(self, engine: RolloutEngine, codec: Codec, limits: Limits, request: str, terms: Terms):
        self.terms = terms
        self.over = asyncio.Event()
        self.aborted, self.full = False, False
        self.failure: Exception | None = None
        self.refusal = ""
        self.turns: list[Turn] = []
        self._engine, self._codec, self._limits, self._request = engine, codec, limits, request
        self._asked = self._branches = 0
        self._open: set[asyncio.Task[Completion]] = set()
        self._closed = False

    @property
    def last(self) -> Turn | None:
        return max(self.turns, key=lambda turn: turn.number, default=None)

    async def ask(self, chat: Chat) -> ChatReply:
        """Waits for the engine. Cancelling the caller frees its slot. Raises RefusedRequest."""
        if self._closed or self.over.is_set():
            raise RefusedRequest(410, ENDED, code="session_ended")
        self._asked += 1
        number, transcript = self._asked, self._begin(chat)
        before = transcript.tokens
        limits = with_texts(transcript.limits(chat.max_tokens), self._codec, chat.stop)
        completion = await self._sample(before, limits)
        codec = limits.stop_texts or self._codec
        transcript.said(completion)
        text = codec.decode(completion.tokens)
        message = assistant_message(text, number, chat.tools, self.terms.call_marks)
        before_it, begun = parted(chat.messages)
        messages = [*before_it, message | {"content": begun + message["content"]}]
        self.turns.append(Turn(number, messages, chat.tools, transcript, completion, codec, begun))
        self.full = False
        AGENTS["turns"] += 1
        return reply_of(number, message, len(before), completion, limits)

    def close(self) -> None:
        """Give no more answers; awaited ones are refused."""
        self._closed = True
        for work in self._open:
            work.cancel()

    def _begin(self, chat: Chat) -> Transcript:
        alike = [turn for turn in self.turns if turn.tools == chat.tools]
        found = [turn for turn in alike if turn.messages == chat.messages[: len(turn.messages)]]
        before = max(found, key=lambda turn: (len(turn.messages), turn.number), default=None)
        most = most_characters(self._limits.max_tokens)
        if len(json.dumps([chat.messages, chat.tools], ensure_ascii=False)) > most:
            raise self._no_room(f"the request has more than {most:,} characters")
        try:
            if before is None:
                return Transcript(self._codec.opening(chat.messages, chat.tools), self._next_stretch())
            transcript = self._go_on(before, chat)
        except ValueError as error:
            raise RefusedRequest(400, str(error), param="messages") from None
        if transcript.room < 1:
            raise self._no_room(f"the sample's response may have {self._limits.max_tokens} tokens in all")
        return transcript

    def _go_on(self, before: Turn, chat: Chat) -> Transcript:
        """Behind a turn, or in a new context if the chat template rewrites that turn. Raises ValueError."""
        new, said = chat.messages[len(before.messages) :], before.messages[-1]["content"]
        if rewrites(self._codec, said, new, chat.tools):
            transcript = before.transcript.branch(self._next_stretch())
            transcript.forked(self._codec.opening(chat.messages, chat.tools), transcript.whole)
            return transcript
        last = int(before.completion.tokens[-1])
        shown = self._codec.continuation(new, chat.tools, closed=before.completion.finish == "stop" and last)
        if len(shown) < before.transcript.room:
            before.followers += 1
        limits = before.transcript.whole if before.followers <= 1 else self._next_stretch()
        transcript = before.transcript.branch(limits)
        transcript.shown(shown)
        return transcript

    def _next_stretch(self) -> Limits:
        """The sample's limits, from another place in its stream of random numbers each time."""
        offset = self._limits.offset + self._branches * self._limits.max_tokens
        self._branches += 1
        return replace(self._limits, offset=offset)

    def _no_room(self, why: str) -> RefusedRequest:
        self.full = True
        text = f"no room for an answer: this model's maximum context length is reached: {why}"
        return RefusedRequest(400, text, param="messages", code="context_length_exceeded")

    async def _sample(self, tokens: np.ndarray, limits: Limits) -> Completion:
        work = asyncio.ensure_future(self._engine.generate(tokens, limits, self._request))
        self._open.add(work)
        try:
            completion = await work
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed and caller is not None and not caller.cancelling():
                raise RefusedRequest(410, ENDED, code="session_ended") from None
            raise
        except ValueError as error:
            raise self._no_room(str(error)) from None
        except Exception as error:
            self.failure = error
            self.over.set()
            raise RefusedRequest(500, f"the engine failed: {error}") from None
        finally:
            self._open.discard(work)
        if completion.finish == "abort":
            self.aborted = True
            self.over.set()
            raise RefusedRequest(410, ENDED, code="session_ended")
        return completion
