"""An agent as an async function, in the actor's own process: no start of a program for each sample.

    areal-like train configs/copy4.yaml "workflow={name: agent, agent: 'examples.agent_function:copies'}"

It may use any client that does not block. One client serves all samples of an actor, so connections are kept; the key
goes with each request. With OpenAI's own that is `client.with_options(api_key=key)`: docs/tasks-and-environments.md.
"""

import asyncio
from functools import cache
from typing import Any

import aiohttp


async def copies(base_url: str, key: str, row: dict[str, Any]) -> float:
    """Asks for the digits of the prompt; the reward is the share of them that came back."""
    question = {"model": "gpt-4o-mini", "messages": row["messages"]}
    client, _ = kept_client(base_url)
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{base_url}/chat/completions"
    async with (await client).post(url, json=question, headers=headers, raise_for_status=True) as answer:
        said = (await answer.json())["choices"][0]["message"]["content"]
    wanted = "".join(map(str, row["answer"]))
    right = sum(a == b for a, b in zip(said, wanted, strict=False))
    return right / max(len(said), len(wanted))


@cache
def kept_client(base_url: str) -> tuple[asyncio.Future[aiohttp.ClientSession], asyncio.Task[None]]:
    """An actor's client, and the task that closes it when the actor's event loop ends."""
    client = asyncio.get_running_loop().create_future()
    return client, asyncio.create_task(keep(client))


async def keep(client: asyncio.Future[aiohttp.ClientSession]) -> None:
    async with aiohttp.ClientSession() as session:
        client.set_result(session)
        await asyncio.Event().wait()
