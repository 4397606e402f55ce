"""The endpoint over real HTTP: keys, concurrent samples, clients that hang up, cut samples; OpenAI's client."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import numpy as np
import pytest

from actors.agents import endpoint as endpoints
from actors.agents.workflow import agent as workflow
from actors.worker import Rollout, Worker
from areal_like.types import CarriedSamples, Lease, Prompt
from tests.actors.agents.scene import (
    EOS,
    SECONDS,
    TEXT,
    engine_of,
    limits_of,
    named,
    play,
    post,
    prompt_of,
    rollout,
    said,
    user,
    verifier,
)  # fmt: skip
from tests.actors.test_resumption import Client, left_by


def run(scenario: Any) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, SECONDS))


async def until(event: Any) -> None:
    while not event():
        await asyncio.sleep(0.001)


def test_a_key_is_needed_and_ends_with_its_sample():
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
        assert (await post(base_url, key, "no object"))[0] == 400
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
            async with session.get(base_url + "/models") as answer:
                assert [each["id"] for each in (await answer.json())["data"]] == ["policy"]
            async with session.post(base_url + "/chat/completions", data=b"{half") as answer:
                assert answer.status == 400 and "not JSON" in (await answer.json())["error"]["message"]
            for data, status in ((b"[" * 100_000, 400), (b" " * (endpoints.MAX_BODY_BYTES + 1), 413)):
                async with session.post(base_url + "/chat/completions", data=data) as answer:
                    assert answer.status == status and (await answer.json())["error"]["message"]
        await said(base_url, key, row["messages"])

    async def scenario():
        engine = engine_of()
        await rollout(asks, engine)
        ((base_url, key),) = keys
        assert base_url.startswith("http://127.0.0.1:")
        status, answer = await post(base_url, key, {"messages": [user("1")]})
        assert (status, answer["error"]["code"]) == (410, "session_ended")
        assert engine.stats()["running"] == 0

    run(scenario())
    assert not endpoints._endpoints, "it has ended with its event loop"


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


# A worker's samples: cancelled, handed back, gone on with elsewhere


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


class Actor:
    def __init__(self, function: Any):
        self.client, self.engine = Client(), engine_of()
        played = partial(workflow, agent=named(function))
        rollout = Rollout(3, 1.0, None, played, {})
        self.worker = Worker(Task(), self.engine, verifier, self.client, rollout, {0: "d0"})  # type: ignore[arg-type]

    def lease(self, carried: CarriedSamples | None = None) -> None:
        self.worker.start([Lease(7, 0, "train", 3, 3)], {7: carried} if carried else {})

    async def group(self) -> Any:
        await until(lambda: self.client.groups or self.client.failures)
        await self.engine.close()
        return self.client.groups[0]


@pytest.mark.parametrize("after", [1, 20, 45, 80])
def test_a_sample_that_was_broken_off_goes_on_elsewhere_with_the_same_tokens(after):
    async def scenario():
        whole, first, second = Actor(counting), Actor(counting), Actor(counting)
        whole.lease()
        expected = await whole.group()
        first.lease()
        await until(lambda: first.engine.stats()["tokens"] >= after)
        await first.worker.hand_back()
        await first.engine.close()
        second.lease(left_by(first))
        group = await second.group()
        assert not first.client.failures and not first.client.groups
        total = first.engine.stats()["tokens"] + second.engine.stats()["tokens"]
        assert total == whole.engine.stats()["tokens"] > after, "a token was sampled twice"
        for ours, theirs in zip(group.samples, expected.samples, strict=True):
            np.testing.assert_array_equal(ours.tokens, theirs.tokens)
            np.testing.assert_array_equal(ours.loss_mask, theirs.loss_mask)
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)

    run(scenario())


def test_an_agent_that_crashes_costs_its_sample_then_its_group_with_the_reason():
    tries: list[str] = []

    async def unlucky(base_url, key, row):
        tries.append((await said(base_url, key, row["messages"], max_tokens=9))["content"])
        if len(tries) == 1:
            raise KeyError("oh")
        return 1.0

    async def hopeless(base_url, key, row):
        raise KeyError("oh")

    async def scenario():
        actor = Actor(unlucky)
        actor.client.left_out = lambda *left: None  # type: ignore[attr-defined]
        actor.lease()
        assert len((await actor.group()).samples) == 3 and len(tries) == 4, "one was drawn anew"
        assert len(set(tries)) > 1
        actor = Actor(hopeless)
        actor.lease()
        await until(lambda: actor.client.failures)
        ((group, reason, detail),) = actor.client.failures
        assert (group, reason) == (7, "agent crashed") and "KeyError('oh') at" in detail and "test_endpoint" in detail

    run(scenario())


# Other clients


def test_the_openai_client_needs_no_change():
    openai = pytest.importorskip("openai", reason="the package openai is not installed")

    async def usual(base_url, key, row):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            messages = [*row["messages"]]
            for reply in ("1", "2"):
                answer = await client.chat.completions.create(model="gpt-4o", messages=messages, max_tokens=5)
                messages += [answer.choices[0].message, user(reply)]
            with pytest.raises(openai.BadRequestError, match="behaviour logprobs would differ"):
                await client.chat.completions.create(model="gpt-4o", messages=messages, top_p=0.5)
            parts = [
                chunk.choices[0].delta.content or ""
                async for chunk in await client.chat.completions.create(
                    model="gpt-4o", messages=messages, max_tokens=5, stream=True
                )
            ]
            heard.append("".join(parts))
        async with openai.AsyncOpenAI(base_url=base_url, api_key="sk-wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()

    heard: list[str] = []
    sample = play(usual)
    assert (~sample.loss_mask).sum() == 2, "three turns of one conversation"
    assert TEXT.decode(sample.tokens).endswith("2" + heard[0])
