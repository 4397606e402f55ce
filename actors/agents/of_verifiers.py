"""The agent of `task=verifiers`: an environment of that package plays, and its rubric scores. Its code (tools, rewards)
runs in the actor's event loop: it must not block."""

from __future__ import annotations

from functools import cache
from typing import Any

from areal_like.tasks.verifiers import environment, example


async def play(base_url: str, key: str, row: dict[str, Any]) -> float:
    """One rollout, and its reward. An answer without a word earns what the rubric gives an empty conversation. Raises
    what went wrong otherwise: the sample is drawn again."""
    import verifiers

    asked = row["answer"]
    place = asked["env"], asked["args"]
    env = environment(*place)
    client = client_of(base_url).with_options(api_key=key)
    given = example(*place, *asked["example"]) | {"prompt": row["messages"]}
    state = await env.rollout(given, client, "policy", {})
    error = state.get("error")
    if error is not None and not isinstance(error, verifiers.EmptyModelResponseError):
        raise error
    await env.rubric.score_rollout(state)
    return float(state["reward"])


@cache
def client_of(base_url: str) -> Any:
    """An actor's one client: its connections serve all samples."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=base_url, api_key="of each sample", max_retries=0, timeout=None)
