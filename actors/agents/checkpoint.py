"""A checkpoint as an OpenAI-compatible chat endpoint on the loopback, for judges, agents and harnesses. Keeps no state,
ignores keys. A request's `seed` names its stream of random numbers: the same request gets the same answer."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from aiohttp import web

from actors.agents import chat as chats
from actors.agents.chat import RefusedRequest
from actors.agents.endpoint import answered, body_of, listening
from actors.engines.torch_engine import TorchEngine
from areal_like.interfaces import Codec
from areal_like.sampling import stream_key
from areal_like.stops import with_texts
from areal_like.types import Limits

OWN_TEMPERATURE = chats.Terms(temperature=None)


@dataclass
class CheckpointServer:
    """`codec`: the model's text; `stop`: tokens that end a response; `positions`: most tokens of a sequence; `name`:
    the model's, for /v1/models (requests may name any); `longest`: default of max_tokens."""

    engine: TorchEngine
    codec: Codec
    stop: tuple[int, ...]
    positions: int
    name: str
    seed: int = 0
    longest: int = 512
    numbers: Iterator[int] = field(default_factory=count)

    @asynccontextmanager
    async def served(self, port: int = 0) -> AsyncIterator[str]:
        """Serve until the block ends; yields the base URL. Raises OSError if it cannot listen."""
        handlers = {("POST", "/v1/chat/completions"): self._chat, ("GET", "/v1/models"): self._models}
        async with listening(handlers, port) as url:
            yield url

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(chats.models(self.name))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        chat, number = chats.parse(await body_of(request), OWN_TEMPERATURE), next(self.numbers)
        try:
            prompt = self.codec.opening(chat.messages, chat.tools)
        except ValueError as error:
            raise RefusedRequest(400, str(error), param="messages") from None
        return await answered(chat, self._reply(chat, number, prompt))

    async def _reply(self, chat: chats.Chat, number: int, prompt: np.ndarray) -> chats.ChatReply:
        try:
            limits = with_texts(self._limits(prompt, chat, number), self.codec, chat.stop)
            completion = await self.engine.generate(prompt, limits, str(number))
        except ValueError as error:
            raise RefusedRequest(400, str(error), param="messages") from None
        except RuntimeError as error:
            raise RefusedRequest(500, f"the engine failed: {error}") from None
        text = (limits.stop_texts or self.codec).decode(completion.tokens)
        message = chats.assistant_message(text, number, chat.tools, OWN_TEMPERATURE.call_marks)
        return chats.reply_of(number, message, len(prompt), completion, limits)

    def _limits(self, prompt: np.ndarray, chat: chats.Chat, number: int) -> Limits:
        """Raises RefusedRequest for a prompt that leaves no room."""
        room = self.positions - len(prompt)
        if room < 1:
            why = f"{len(prompt)} tokens of prompt leave no room: the model has {self.positions} positions"
            raise RefusedRequest(400, why, param="messages", code="context_length_exceeded")
        key = stream_key(self.seed, 0, number) if chat.seed is None else stream_key(self.seed, 1, chat.seed)
        longest = min(chat.max_tokens or self.longest, room)
        return Limits(longest, chat.temperature, self.stop, key=key, trained=False)
