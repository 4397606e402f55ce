"""An agent as an async function, in the actor's own process: no start of a program for each sample.

    python -m scripts.train configs/agent.yaml

It may use any client that does not block, such as openai.AsyncOpenAI(base_url=base_url, api_key=key).
"""

from typing import Any

import aiohttp


async def copies(base_url: str, key: str, row: dict[str, Any]) -> float:
    """Asks for the digits of the prompt, and says what share of them came back."""
    question = {"model": "gpt-4o-mini", "messages": row["messages"]}
    async with (
        aiohttp.ClientSession(base_url.removesuffix("v1"), headers={"Authorization": f"Bearer {key}"}) as session,
        session.post("/v1/chat/completions", json=question, raise_for_status=True) as answer,
    ):
        said = (await answer.json())["choices"][0]["message"]["content"]
    wanted = "".join(map(str, row["answer"]))
    right = sum(a == b for a, b in zip(said, wanted, strict=False))
    return right / max(len(said), len(wanted))
