"""Bodies of OpenAI's (legacy) completions: checks requests, writes answers. Pure.

They continue a text as it stands, without a chat template. With `echo` and `logprobs` the answer has the logprob of
each prompt token; harnesses use these to choose among given answers. Logprobs are those of temperature 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.agents.chat import (
    MODEL,
    NEUTRAL,
    WITHOUT_EFFECT,
    RefusedRequest,
    Terms,
    fields_of,
    hold_sampling,
    seed_of,
    stop_texts,
    temperature_of,
    typed,
    usage,
)
from actors.engines.ranking import Ranked

READ = {"model", "prompt", "max_tokens", "temperature", "stop", "echo", "logprobs"}
LACKING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
}
"""Fields for missing features → the values that do not ask for them."""
DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""
MOST_LOGPROBS = 20
SAMPLED = Terms(temperature=None)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request that can be answered. Each of `prompts` is a text, or token ids. `logprobs`: how many of the likeliest
    tokens are told beside each token (None: no logprobs)."""

    model: str
    prompts: list[str | list[int]]
    max_tokens: int
    temperature: float
    stop: tuple[str, ...]
    echo: bool
    logprobs: int | None
    seed: int | None


@dataclass(frozen=True, slots=True)
class Continued:
    """A prompt's tokens, int [P], and what the model said, int [R] and as text; `ranks` of both, where they were asked
    for."""

    prompt: np.ndarray
    tokens: np.ndarray
    text: str
    finish: str
    ranks: Ranked | None = None


def parse(body: Any) -> CompletionRequest:
    """Raises Refused."""
    given = fields_of(body, READ | NEUTRAL.keys() | WITHOUT_EFFECT, LACKING)
    hold_sampling(given, SAMPLED)
    echo, logprobs = typed(given, "echo", bool, False), given.get("logprobs")
    if logprobs is not None and (type(logprobs) is not int or not 0 <= logprobs <= MOST_LOGPROBS):
        raise RefusedRequest(
            400, f"logprobs must be an integer from 0 to {MOST_LOGPROBS}, got {logprobs!r}", param="logprobs"
        )
    longest = given.get("max_tokens", DEFAULT_MAX_TOKENS)
    if type(longest) is not int or longest < (0 if echo else 1):
        least = "0" if echo else "1 (0 with echo)"
        raise RefusedRequest(
            400, f"max_tokens must be an integer of at least {least}, got {longest!r}", param="max_tokens"
        )
    model, prompts = str(given.get("model", MODEL)), _prompts(given.get("prompt"))
    temperature, stop = temperature_of(given), stop_texts(given)
    return CompletionRequest(model, prompts, longest, temperature, stop, echo, logprobs, seed_of(given))


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One or several, each a text or token ids."""
    several = isinstance(prompt, list) and not all(type(each) is int for each in prompt)
    found = prompt if several else [prompt]
    for each in found:
        is_ids = isinstance(each, list) and each and all(type(token) is int and 0 <= token < 1 << 31 for token in each)
        if not (is_ids or (isinstance(each, str) and each)):
            want = "prompt must be a text, token ids (from 0 on), or a list of these, none of them empty"
            raise RefusedRequest(400, want, param="prompt")
    return found


def completion(
    asked: CompletionRequest, number: int, said: Sequence[Continued], piece: Callable[[int], str]
) -> dict[str, Any]:
    """`piece` is the text of one token."""
    choices = [_choice(asked, index, each, piece) for index, each in enumerate(said)]
    told = usage(sum(len(each.prompt) for each in said), sum(len(each.tokens) for each in said))
    head = {"id": f"cmpl-{number}", "object": "text_completion", "created": int(time.time()), "model": asked.model}
    return head | {"choices": choices, "usage": told}


def _choice(asked: CompletionRequest, index: int, said: Continued, piece: Callable[[int], str]) -> dict[str, Any]:
    found = {"index": index, "text": said.text, "logprobs": None, "finish_reason": said.finish}
    if said.ranks is None:
        return found
    tokens = np.concatenate([said.prompt, said.tokens])
    first = 0 if asked.echo else len(said.prompt)
    return found | {"logprobs": _logprobs(tokens.tolist(), first, said.ranks, piece)}


def _logprobs(tokens: list[int], first: int, ranks: Ranked, piece: Callable[[int], str]) -> dict[str, Any]:
    """From the token at `first` on. Nothing comes before the first token of all, so it has no logprob."""
    texts = [piece(token) for token in tokens[first:]]
    chances: list[float | None] = [None, *ranks.logprobs.tolist()]
    tops: list[dict[str, float] | None] = [None]
    for place, logprob in enumerate(ranks.logprobs.tolist(), 1):
        found = {piece(tokens[place]): logprob}
        for token, value in zip(ranks.top[place - 1].tolist(), ranks.top_logprobs[place - 1].tolist(), strict=True):
            text = piece(token)
            found[text] = max(value, found.get(text, value))  # several tokens may look the same
        tops.append(found)
    offsets = np.cumsum([0, *map(len, texts)])[:-1].tolist()
    return {"tokens": texts, "token_logprobs": chances[first:], "top_logprobs": tops[first:], "text_offset": offsets}
