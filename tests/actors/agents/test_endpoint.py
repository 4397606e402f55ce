"""The endpoint over real HTTP: keys, concurrent samples, clients that hang up, cut samples; OpenAI's client."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import pytest

from actors.agents import endpoint as endpoints
from actors.agents.workflow import agent as workflow
from areal_like.types import Prompt
from tests.actors.agents.scene import (
    EOS,
    engine_of,
    limits_of,
    named,
    play,
    post,
    prompt_of,
    rollout,
    said,
    user,
)  # fmt: skip
from tests.actors.looped import looped
from tests.actors.test_resumption import Actor, resumed


async def until(event: Any) -> None:
    while not event():
        await asyncio.sleep(0.001)


@looped
async def test_a_key_is_needed_and_ends_with_its_sample():
    keys: list[tuple[str, str]] = []

    async def asks(base_url, key, row):
        keys.append((base_url, key))
        body = {"messages": row["messages"]}
        for wrong in ("", "sk-wrong"):
            status, answer = await post(base_url, wrong, body)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert (await post(base_url, key, body, "/completions"))[0] == 404
        status, answer = await post(base_url, key, {"input": "3a7"}, "/responses")
        assert status == 404 and "client.chat.completions.create" in answer["error"]["message"]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
            for data, status in ((b"{half", 400), (b"[" * 100_000, 400), (b" " * (endpoints.MAX_BODY_BYTES + 1), 413)):
                async with session.post(base_url + "/chat/completions", data=data) as answer:
                    assert answer.status == status and (await answer.json())["error"]["message"]
        await said(base_url, key, row["messages"])

    engine = engine_of()
    await rollout(asks, engine)
    ((base_url, key),) = keys
    assert base_url.startswith("http://127.0.0.1:") and engine.stats()["running"] == 0
    status, answer = await post(base_url, key, {"messages": [user("1")]})
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


@looped
async def test_it_is_reached_without_the_proxy_of_the_environment(monkeypatch):
    for name, value in {"http_proxy": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": "elsewhere"}.items():
        monkeypatch.setenv(name, value)

    async def asks(base_url, key, row):
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(trust_env=True, headers=headers) as session:
            assert (await session.get(base_url + "/models")).status == 200
        await said(base_url, key, row["messages"])

    await rollout(asks, engine_of())


def test_a_client_that_hangs_up_frees_its_slot_and_may_ask_again():
    async def impatient(base_url, key, row):
        asked = asyncio.create_task(said(base_url, key, row["messages"]))
        await until(lambda: engine.stats()["running"])
        asked.cancel()
        await until(lambda: not engine.stats()["running"])
        assert engine.stats()["tokens"] < 60, "not those of the whole answer"
        await said(base_url, key, row["messages"], max_tokens=3)

    engine = engine_of()
    sample = play(impatient, replace(limits_of(100), stop=()), engine=engine)
    assert sample.response_length == 3 and sample.loss_mask.all()


async def counting(base_url: str, key: str, row: dict[str, Any]) -> float:
    """An agent of four turns; its messages depend only on the answers it gets."""
    messages = [*row["messages"]]
    for _ in range(4):
        messages.append(await said(base_url, key, messages, max_tokens=8))
        messages.append(user(str(len(messages[-1]["content"]))))
    return 0.5


class Task:
    stop_tokens = (EOS,)

    def prompt(self, split: str, row: int) -> Prompt:
        return prompt_of()


def actor_of(function: Any) -> Actor:
    return Actor(task=Task(), workflow=partial(workflow, agent=named(function)), engine=engine_of())


@pytest.mark.parametrize("after", [1, 45])
@looped
async def test_a_sample_that_was_broken_off_goes_on_elsewhere_with_the_same_tokens(after):
    group, _, first, second = await resumed(partial(actor_of, counting), after)
    total = first.engine.stats()["tokens"] + second.engine.stats()["tokens"]
    assert total == sum(int(sample.loss_mask.sum()) for sample in group.samples), "a token was sampled twice"


@looped
async def test_an_agent_that_crashes_costs_its_group_with_the_reason():
    async def hopeless(base_url, key, row):
        raise KeyError("oh")

    actor = actor_of(hopeless)
    await actor.group()
    ((group, reason, detail),) = actor.client.failures
    assert (group, reason) == (7, "agent crashed") and "KeyError('oh') at" in detail and "test_endpoint" in detail
