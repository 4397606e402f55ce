"""Two servers behind one engine: updates reach both, cut sequences continue on either, requests have versions."""

import asyncio
from typing import Any

import aiohttp
import numpy as np
import pytest

from actors.agents.workflow import agent as workflow
from areal_like.tasks.characters import CharacterCodec
from areal_like.types import Limits, Prompt
from tests.sglang.servers import (
    VOCAB,
    Published,
    engine_for,
    generate,
    greedy_of,
    logprobs_of,
    prompts_of,
    serving,
    slow_down,
)  # fmt: skip

pytestmark = pytest.mark.integration
TEXT = CharacterCodec("".join(chr(0x4E00 + token) for token in range(VOCAB)))


class Bench:
    def __init__(self, runner, engine, published):
        self.run, self.engine, self.published = runner.run, engine, published


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    published = Published("qwen2")
    with asyncio.Runner() as runner:

        async def begin():
            engine = engine_for(published, tmp_path_factory.mktemp("replicas"), replicas=2)
            stack = serving(engine)
            await stack.__aenter__()
            await engine.load(published.update())
            return engine, stack

        engine, stack = runner.run(begin())
        try:
            yield Bench(runner, engine, published)
        finally:
            runner.run(stack.__aexit__(None, None, None))


async def both_busy(engine):
    async with asyncio.timeout(60):
        while min(server.load for server in engine._servers) < 2:
            await asyncio.sleep(0.01)


def test_updates_in_flight_reach_both_servers(bench):
    engine, published = bench.engine, bench.published

    async def check():
        await slow_down(engine, 0.02)
        prompts = prompts_of(*range(4, 20))
        whole = engine.stats()["whole_updates"]
        asked = [asyncio.create_task(generate(engine, each, 40, key=n)) for n, each in enumerate(prompts)]
        await both_busy(engine)
        models = {published.version: published.frozen()}
        for _ in range(4):
            update = published.step()
            await engine.load(update)
            models[published.version] = published.frozen()
            assert {server.digest for server in engine._servers} == {update.digest}
            await asyncio.sleep(0.1)
        done = await asyncio.gather(*asked)
        await slow_down(engine, 0)
        assert engine.stats()["whole_updates"] == whole, "each by a patch"
        assert any(len(completion.runs) > 1 for completion in done)
        for prompt, completion in zip(prompts, done, strict=True):
            hold(completion.runs, completion.logprobs, prompt, completion.tokens, models)

    bench.run(check())


def hold(runs, logprobs, prompt, response, models):
    """Each token's logprob is that of its recorded version (`retract`: keys and values are computed again)."""
    at = 0
    for version, count in runs:
        expected = logprobs_of(models[version], prompt, response)
        assert np.abs(logprobs - expected)[at : at + count].max() < 1e-3, (version, at, count)
        at += count
    assert at == len(response)


def test_what_was_cut_on_one_server_goes_on_on_the_other(bench):
    engine, published = bench.engine, bench.published

    async def check():
        await slow_down(engine, 0.05)
        prompts = prompts_of(5, 6, 7, 8, seed=3)
        asked = [asyncio.create_task(generate(engine, each, 400, 0, request=str(n))) for n, each in enumerate(prompts)]
        await both_busy(engine)
        await asyncio.sleep(0.5)
        engine.abort(["0", "1", "2", "3"])
        parts = await asyncio.gather(*asked)
        await slow_down(engine, 0)
        assert any(0 < len(part.tokens) < 400 for part in parts)
        so_far = [np.concatenate([prompt, part.tokens]) for prompt, part in zip(prompts, parts, strict=True)]
        for out_of_service in engine._servers:
            out_of_service.ready.clear()  # so that each goes on on the other one, too
            try:
                rests = await asyncio.gather(*(generate(engine, each, 10, 0) for each in so_far))
            finally:
                out_of_service.ready.set()
            for prompt, part, rest in zip(prompts, parts, rests, strict=True):
                assert [*part.tokens, *rest.tokens] == greedy_of(published.model, prompt, len(part.tokens) + 10)

    bench.run(check())


# Agents

TURNS = 3
UPDATED = asyncio.Event()


async def talks(base_url: str, key: str, row: dict[str, Any]) -> float:
    messages = [*row["messages"]]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
        for turn in range(TURNS):
            if turn == TURNS - 1:
                await UPDATED.wait()
            body = {"messages": messages, "max_tokens": 12}
            async with session.post(base_url + "/chat/completions", json=body, raise_for_status=True) as answer:
                said = (await answer.json())["choices"][0]["message"]
            messages += [said, {"role": "user", "content": said["content"][:2]}]
    return 1.0


def test_agents_talk_to_the_servers_while_weights_change(bench):
    engine, published = bench.engine, bench.published

    async def verifier(prompt, tokens):
        raise AssertionError("the agent has given the reward")

    async def check():
        await slow_down(engine, 0.02)
        models, before = {published.version: published.frozen()}, engine.stats()["tokens"]
        prompts = prompts_of(*range(3, 19), seed=4)
        samples = [
            asyncio.create_task(
                workflow(
                    engine, verifier,
                    Prompt(each, None, 60, (), TEXT, ({"role": "user", "content": TEXT.decode(each)},)),
                    Limits(60, 1.0, (), key=n), f"r{n}", agent=f"{__name__}:talks",
                )
            )
            for n, each in enumerate(prompts)
        ]  # fmt: skip
        async with asyncio.timeout(60):
            while engine.stats()["tokens"] < before + 12:  # until a first turn has ended
                await asyncio.sleep(0.01)
        await engine.load(published.step(share=0.3))
        models[published.version] = published.frozen()
        UPDATED.set()
        done = await asyncio.wait_for(asyncio.gather(*samples), 120)
        await slow_down(engine, 0)
        assert any(len(sample.runs) > 1 for sample in done)
        assert all(sample.newest_version == published.version for sample in done)
        for prompt, sample in zip(prompts, done, strict=True):
            response = sample.tokens[len(prompt) :]
            assert len(response) == 12 * TURNS + 2 * (TURNS - 1) and (~sample.loss_mask).sum() == 2 * (TURNS - 1)
            at = 0
            for version, count in sample.runs:
                expected = logprobs_of(models[version], prompt, response)[at : at + count]
                trained = sample.loss_mask[at : at + count]
                assert np.abs(sample.logprobs[at : at + count] - expected)[trained].max(initial=0) < 1e-3
                at += count

    bench.run(check())
