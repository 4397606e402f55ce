"""A checkpoint behind OpenAI's endpoints, for programs of others: harnesses, judges, agents.

    POST /v1/completions        continues texts or token ids; `echo` and `logprobs` tell how likely a prompt is
    POST /v1/chat/completions   answers messages, in the model's chat template
    GET  /v1/models

Each request is by itself: it has its own temperature, and nothing is remembered. Any number of requests runs at once;
the engine's slots decide how many of them sample. A request whose client hangs up leaves the engine. A key is not
looked at: the server listens on this machine's loopback alone.

A `seed` of the request names its stream of random numbers: the same request is answered the same way. Without one each
request has a stream of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from aiohttp import web

from actors.agents import chat as chats
from actors.agents import completions
from actors.agents.chat import RefusedRequest
from actors.agents.completions import CompletionRequest, Continued
from actors.agents.conversation import until
from actors.agents.endpoint import Told, answered, body_of, listening
from actors.engines.ranking import Ranked
from actors.engines.torch_engine import TorchEngine
from areal_like.interfaces import Codec
from areal_like.sampling import stream_key
from areal_like.types import Completion, Limits

LOOK_EVERY = 8
"""Tokens between two looks for a stop text in what is being written."""


@dataclass(frozen=True)
class Text:
    """A model's text: `codec` for conversations; `encode` a text as it stands; `piece` one token as text; tokens that
    `stop` a response; `positions`: most tokens of a sequence."""

    codec: Codec
    encode: Callable[[str], np.ndarray]
    piece: Callable[[int], str]
    stop: tuple[int, ...]
    positions: int


class CheckpointServer:
    """`name`: the model's, for /v1/models; requests may name any. `longest`: of an answer to a chat request that does
    not say."""

    def __init__(self, engine: TorchEngine, text: Text, name: str, *, seed: int = 0, longest: int = 512):
        self._engine, self._text, self._name = engine, text, name
        self._seed, self._longest = seed, longest
        self._numbers = count()

    @asynccontextmanager
    async def served(self, port: int = 0) -> AsyncIterator[str]:
        """Serve until the block ends; yields the base URL. Raises OSError if it cannot listen."""
        handlers = {
            ("POST", "/v1/completions"): self._complete,
            ("POST", "/v1/chat/completions"): self._chat,
            ("GET", "/v1/models"): self._models,
            ("*", "/{other:.*}"): self._other,
        }
        async with listening(handlers, port) as url:
            yield url

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(chats.models(self._name))

    async def _other(self, request: web.Request) -> web.StreamResponse:
        there = "/v1/completions, /v1/chat/completions and /v1/models"
        raise RefusedRequest(404, f"there is no {request.method} {request.path}, only {there}")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        chat, number = chats.parse(await body_of(request), completions.SAMPLED), next(self._numbers)
        try:
            prompt = self._text.codec.opening(chat.messages, chat.tools)
        except ValueError as error:
            raise RefusedRequest(400, str(error), param="messages") from None
        limits = self._limits(prompt, chat.max_tokens or self._longest, chat.temperature, chat.seed, number)
        decode, marks = self._text.codec.decode, completions.SAMPLED.call_marks

        async def ask(told: Told | None) -> chats.ChatReply:
            heard = None if told is None else lambda text: told(chats.certain(text, chat, marks))
            completion, text = await self._generate(prompt, limits, chat.stop, decode, f"{number}", heard)
            message = chats.spoken(text, number, chat.tools, marks)
            finish = "tool_calls" if "tool_calls" in message else completion.finish
            return chats.ChatReply(number, message, finish, len(prompt), len(completion.tokens))

        return await answered(request, chat, ask)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked, number = completions.parse(await body_of(request)), next(self._numbers)
        prompts = [self._tokens(prompt) for prompt in asked.prompts]
        if asked.logprobs is not None and (asked.max_tokens == 0 or (asked.max_tokens, asked.temperature) == (1, 0)):
            said = await self._likeliest(asked, prompts)
        else:
            said = await self._continued(asked, prompts, number)
        return web.json_response(completions.completion(asked, number, said, self._text.piece))

    async def _continued(self, asked: CompletionRequest, prompts: list[np.ndarray], number: int) -> list[Continued]:
        """What the model says to all prompts at once."""

        async def one(place: int, prompt: np.ndarray) -> Continued:
            if asked.max_tokens == 0:
                return self._written(asked, prompt, prompt[:0], "", "length")
            limits = self._limits(prompt, asked.max_tokens, asked.temperature, asked.seed, number, place)
            name, behind = f"{number}/{place}", self._behind(prompt)
            completion, text = await self._generate(prompt, limits, asked.stop, behind, name)
            return self._written(asked, prompt, completion.tokens, text, completion.finish)

        said = await asyncio.gather(*(one(place, prompt) for place, prompt in enumerate(prompts)))
        if asked.logprobs is None:
            return said
        whole = [np.concatenate([each.prompt, each.tokens]) for each in said]
        ranks = await self._ranked(whole, asked.logprobs)
        return [replace(each, ranks=found) for each, found in zip(said, ranks, strict=True)]

    async def _likeliest(self, asked: CompletionRequest, prompts: list[np.ndarray]) -> list[Continued]:
        """How likely the prompts are, and the likeliest token after each if one is wanted, by one forward: what
        harnesses ask most."""
        found = []
        for prompt, ranks in zip(prompts, await self._ranked(prompts, max(1, asked.logprobs or 0)), strict=True):
            tokens, most = ranks.top[-1, : asked.max_tokens], asked.logprobs or 0
            finish = "stop" if len(tokens) and int(tokens[0]) in self._text.stop else "length"
            logprobs = np.concatenate([ranks.logprobs, ranks.top_logprobs[-1, : asked.max_tokens]])
            told = Ranked(logprobs, ranks.top[:, :most], ranks.top_logprobs[:, :most])
            said = self._written(asked, prompt, tokens, self._behind(prompt)(tokens), finish)
            found.append(replace(said, ranks=told))
        return found

    async def _ranked(self, sequences: list[np.ndarray], most: int) -> list[Ranked]:
        try:
            return await self._engine.ranked(sequences, most)
        except ValueError as error:
            raise RefusedRequest(400, str(error), param="prompt", code="context_length_exceeded") from None

    def _written(
        self, asked: CompletionRequest, prompt: np.ndarray, tokens: np.ndarray, text: str, finish: str
    ) -> Continued:
        before = self._text.codec.decode(prompt) if asked.echo else ""
        return Continued(prompt, tokens, before + text, finish)

    async def _generate(
        self,
        prompt: np.ndarray,
        limits: Limits,
        stops: tuple[str, ...],
        decode: Callable[[np.ndarray], str],
        name: str,
        told: Told | None = None,
    ) -> tuple[Completion, str]:
        """What the model says, and its text, up to the first of the `stops`; generation ends soon after that. `told`
        hears the text so far."""

        def heard(tokens: np.ndarray) -> None:
            if told is not None or len(tokens) % LOOK_EVERY == 0:
                text = decode(tokens)
                if told is not None:
                    told(text)
                if any(stop in text for stop in stops):
                    self._engine.abort([name])

        try:
            watched = heard if stops or told is not None else None
            completion = await self._engine.generate(prompt, limits, name, watched)
        except ValueError as error:
            raise RefusedRequest(400, str(error), param="prompt") from None
        except RuntimeError as error:
            raise RefusedRequest(500, f"the engine failed: {error}") from None
        return until(decode, stops, completion)

    def _limits(
        self, prompt: np.ndarray, longest: int, temperature: float, seed: int | None, number: int, place: int = 0
    ) -> Limits:
        """Raises Refused for a prompt that leaves no room."""
        room = self._text.positions - len(prompt)
        if room < 1:
            why = f"{len(prompt)} tokens of prompt leave no room: the model has {self._text.positions} positions"
            raise RefusedRequest(400, why, param="prompt", code="context_length_exceeded")
        key = stream_key(self._seed, 0, number, place) if seed is None else stream_key(self._seed, 1, seed, place)
        return Limits(min(longest, room), temperature, self._text.stop, key=key, trained=False)

    def _tokens(self, prompt: str | list[int]) -> np.ndarray:
        """Raises Refused."""
        if not isinstance(prompt, str):
            return np.array(prompt, np.int64)
        try:
            return self._text.encode(prompt)
        except ValueError as error:
            raise RefusedRequest(400, str(error), param="prompt") from None

    def _behind(self, prompt: np.ndarray) -> Callable[[np.ndarray], str]:
        """The text of tokens that follow the prompt: some tokenizers leave out the space that a text begins with."""
        decode = self._text.codec.decode
        before = decode(prompt)

        def text_of(tokens: np.ndarray) -> str:
            whole = decode(np.concatenate([prompt, tokens]))
            return whole.removeprefix(before) if whole.startswith(before) else decode(tokens)

        return text_of
