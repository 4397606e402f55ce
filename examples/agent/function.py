"""Agents as async functions, in the actor's own process: no start of a program for each sample.

The prompts are those of `configs/copy4.yaml`. An agent may use any client that does not block. One client serves all
samples of an actor, so connections are kept; the key goes with each request. With OpenAI's own that is
`client.with_options(api_key=key)`: docs/tasks-and-environments.md.
"""

import asyncio
from functools import cache
from typing import Any

import aiohttp

Messages = list[dict[str, Any]]


async def copies(base_url: str, key: str, row: dict[str, Any]) -> float:
    """Asks for the digits of the prompt; the reward is the share of them that came back."""
    said = (await answer(base_url, key, row["messages"]))["content"]
    wanted = "".join(map(str, row["answer"]))
    right = sum(a == b for a, b in zip(said, wanted, strict=False))
    return right / max(len(said), len(wanted))


async def turns(base_url: str, key: str, row: dict[str, Any]) -> list[float]:
    """Asks for one digit after the other, in one conversation; each turn has a reward of its own."""
    wanted, messages, rewards = list(map(str, row["answer"])), Messages(), list[float]()
    for digit in wanted:
        messages.append({"role": "user", "content": f"{digit}>"})
        messages.append(await answer(base_url, key, messages, max_tokens=1))
        rewards.append(float(messages[-1]["content"] == digit) / len(wanted))
    return rewards


async def answer(base_url: str, key: str, messages: Messages, **fields: Any) -> dict[str, Any]:
    """The model's message."""
    question = {"model": "gpt-4o-mini", "messages": messages, **fields}
    client, _ = kept_client(base_url)
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{base_url}/chat/completions"
    async with (await client).post(url, json=question, headers=headers, raise_for_status=True) as reply:
        return (await reply.json())["choices"][0]["message"]


@cache
def kept_client(base_url: str) -> tuple[asyncio.Future[aiohttp.ClientSession], asyncio.Task[None]]:
    """An actor's client, and the task that closes it when the actor's event loop ends."""
    client = asyncio.get_running_loop().create_future()
    return client, asyncio.create_task(keep(client))


async def keep(client: asyncio.Future[aiohttp.ClientSession]) -> None:
    async with aiohttp.ClientSession() as session:
        client.set_result(session)
        await asyncio.Event().wait()
