"""A tiny model whose tokens are characters, agents that call it over real HTTP, and the workflow between them."""

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np

from actors.agents.workflow import agent as workflow
from actors.engines.torch_engine import TorchEngine
from areal_like.tasks.generated import CharacterCodec
from areal_like.types import Limits, Prompt
from tests.actors.tiny_models import VOCAB, new_model

TEXT = CharacterCodec("0123456789abcdefghijklmnopqrstuvwxyz")
EOS = VOCAB - 1
SECONDS = 60.0


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def prompt_of(text: str = "3a7") -> Prompt:
    return Prompt(TEXT.encode(text), "right", 40, (), TEXT, (user(text),))  # type: ignore[arg-type]


def limits_of(most: int = 40, **more: Any) -> Limits:
    return Limits(most, 1.0, (EOS,), **{"key": 5, **more})


async def verifier(prompt: Prompt, tokens: np.ndarray) -> float:
    return len(tokens) / 100


def engine_of(**knobs: Any) -> TorchEngine:
    return TorchEngine(new_model(), **{"slots": 8, **knobs})


async def post(base_url: str, key: str, body: Any, path: str = "/chat/completions") -> tuple[int, Any]:
    """POST by a new client; returns (status, answer)."""
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
        session.post(base_url + path, json=body) as answer,
    ):
        return answer.status, await answer.json()


async def said(base_url: str, key: str, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The model's answer, as the message to append to `messages`."""
    status, answer = await post(base_url, key, {"model": "any", "messages": messages, **fields})
    assert status == 200, answer
    return answer["choices"][0]["message"]


AGENTS = SimpleNamespace()


def named(function: Any) -> str:
    """The import path of this async function, as a config writes it."""
    name = f"f{len(vars(AGENTS))}"
    setattr(AGENTS, name, function)
    return f"{__name__}:AGENTS.{name}"


async def rollout(function: Any, engine: Any, limits: Limits | None = None, prompt: Prompt | None = None, **knobs: Any):
    """Run one agent, a function or a command, and return its sample."""
    agent = function if isinstance(function, list | str) else named(function)
    run = workflow(engine, verifier, prompt or prompt_of(), limits or limits_of(), "r", agent=agent, **knobs)
    return await asyncio.wait_for(run, SECONDS)


def play(function: Any, *args: Any, engine: Any = None, **knobs: Any) -> Any:
    return asyncio.run(rollout(function, engine or engine_of(), *args, **knobs))
