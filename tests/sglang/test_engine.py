"""One server per architecture: tokens, logprobs and versions against transformers, through many in-flight updates."""

import asyncio

import aiohttp
import numpy as np
import pytest

from areal_like.types import Limits
from tests.actors.tiny_models import experts_of, greedy_of, logprobs_of
from tests.sglang.servers import CONFIGS, assert_sampled_by, bench_for, generate, prompts_of, slowed

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", params=list(CONFIGS))
def bench(request, tmp_path_factory):
    folder, moe = tmp_path_factory.mktemp(request.param), request.param == "qwen3_moe"
    yield from bench_for(request.param, folder, return_experts=moe)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_tokens_and_logprobs_are_those_of_transformers(bench, temperature):
    async def check():
        prompts, model = prompts_of(1, 9, 30, seed=2), bench.published.model
        done = await asyncio.gather(*(generate(bench.engine, each, 20, temperature) for each in prompts))
        for prompt, completion in zip(prompts, done, strict=True):
            expected = logprobs_of(model, prompt, completion.tokens, temperature or 1.0)
            assert np.abs(completion.logprobs - expected).max() < 1e-3
            assert completion.finish == "length"
            if temperature == 0:
                np.testing.assert_array_equal(completion.tokens, greedy_of(model, prompt, 20))

    bench.run(check())


def test_experts_come_back_and_are_those_that_the_model_itself_chooses(bench):
    """Also behind an abort, and behind a kept prompt; not for evaluations."""
    engine, model, (prompt,) = bench.engine, bench.published.model, prompts_of(17, seed=21)

    async def check():
        whole = await generate(engine, prompt, 20)
        if model.config.model_type != "qwen3_moe":
            assert whole.experts is None
            return
        rest = await engine.generate(prompt, Limits(8, experts_from=5))
        async with slowed(engine, 0.05):
            asked = asyncio.create_task(generate(engine, prompt, 30, request="cut"))
            await asyncio.sleep(0.6)
            engine.abort(["cut"])
            cut = await asyncio.wait_for(asked, 10)
        assert 0 < len(cut.tokens) < 30
        for done, first in ((whole, 0), (rest, 5), (cut, 0)):
            expected = experts_of(model, [*prompt, *done.tokens])[first:]
            assert done.experts.dtype == np.uint8
            np.testing.assert_array_equal(np.sort(done.experts, -1), expected)
        assert (await engine.generate(prompt, Limits(4, trained=False))).experts is None

    bench.run(check())


def test_fifty_updates_under_sixteen_requests(bench):
    """Each update is applied in flight as a patch, the server compares its digest, and every token's logprob is that of
    the version it is recorded under (with `retract`, the KV cache keeps nothing of older weights)."""
    engine, published, going, several = bench.engine, bench.published, [True], []

    async def request(i):
        while going:
            (prompt,) = prompts_of(4 + i % 5, seed=i)
            completion = await generate(engine, prompt, 24, request=f"r{i}", key=i)
            assert_sampled_by(published.models, prompt, completion)
            several.append(len(completion.runs) > 1)

    async def check():
        before = engine.stats()
        async with slowed(engine, 0.005):
            requests = [asyncio.create_task(request(i)) for i in range(16)]
            for _ in range(50):
                await asyncio.sleep(0.05)
                update = published.step()
                await engine.load(update)
                assert (engine.version, engine.digest) == (update.version, update.digest)
                assert engine._servers[0].digest == update.digest
            going.clear()
            await asyncio.gather(*requests)
        stats = engine.stats()
        assert stats["whole_updates"] == before["whole_updates"], "patches were enough"
        assert stats["pauses"] - before["pauses"] >= 25, "the updates met requests in flight"
        assert sum(several) >= 10

    bench.run(check())


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_tokens_have_the_version_that_made_them(bench, mode, monkeypatch):
    """Through an update in flight. Where the sequence is computed again no old keys and values remain."""
    engine, published = bench.engine, bench.published
    monkeypatch.setattr(engine, "_mode", mode)

    async def check():
        prompts, before = prompts_of(5, 6, 7, seed=5), published.version
        async with slowed(engine, 0.05):
            asked = [asyncio.create_task(generate(engine, each, 30)) for each in prompts]
            await asyncio.sleep(0.5)
            await engine.load(published.step(share=0.3))
            done = await asyncio.gather(*asked)
        for prompt, completion in zip(prompts, done, strict=True):
            (first, count), (second, rest) = completion.runs
            assert (first, second, count + rest) == (before, published.version, 30)
            old, new = (logprobs_of(published.models[each], prompt, completion.tokens) for each in (first, second))
            assert np.abs(completion.logprobs - old)[:count].max() < 1e-3
            assert np.abs(completion.logprobs - old)[count:].max() > 1e-3, "old weights after the update"
            if mode != "in_place":
                assert np.abs(completion.logprobs - new)[count:].max() < 1e-3

    bench.run(check())


def test_what_a_request_leaves_while_an_update_begins_is_not_used_under_the_newer_weights(bench, monkeypatch):
    """The request arrives after `load` begins and before the server pauses: old weights compute its prompt. With
    `in_place` the server can't drop its cache."""
    engine, published = bench.engine, bench.published
    server = engine._servers[0]
    post = server.post

    async def check():
        (prompt,), before = prompts_of(40, seed=16), published.version

        async def post_later(path, body):
            if path == "/pause_generation":
                monkeypatch.setattr(server, "post", post)
                assert (await generate(engine, prompt, 2)).runs == [(before, 2)]
            return await post(path, body)

        monkeypatch.setattr(engine, "_mode", "in_place")
        monkeypatch.setattr(server, "post", post_later)
        await engine.load(published.step(share=0.3))
        for _ in range(2):
            completion = await generate(engine, prompt, 8)
            assert completion.runs == [(published.version, 8)]
            assert_sampled_by(published.models, prompt, completion)

    bench.run(check())


def test_aborted_requests_bring_back_what_there_is_and_can_go_on(bench):
    engine = bench.engine

    async def check():
        prompt, other = prompts_of(5, 6, seed=8)
        whole = greedy_of(bench.published.model, prompt, 30)
        async with slowed(engine, 0.05):
            asked = asyncio.create_task(generate(engine, prompt, 30, 0, request="1"))
            stays = asyncio.create_task(generate(engine, other, 30, 0, request="10"))
            await asyncio.sleep(0.6)
            engine.abort(["1"])
            part = await asyncio.wait_for(asked, 10)
            cancelled = asyncio.create_task(generate(engine, prompt, 500, 0))
            await asyncio.sleep(0.3)
            cancelled.cancel()
            assert (await stays).finish == "length"
        assert part.finish == "abort" and 0 < len(part.tokens) < 30
        assert len(part.logprobs) == len(part.tokens) == sum(count for _, count in part.runs)
        rest = await generate(engine, np.concatenate([prompt, part.tokens]), 30 - len(part.tokens), 0)
        np.testing.assert_array_equal([*part.tokens, *rest.tokens], whole)
        while engine._errands:
            await asyncio.sleep(0.05)
        async with asyncio.timeout(20), aiohttp.ClientSession() as session:  # the server would be busy for long
            loads = engine._servers[0].url + "/v1/loads"
            while (await (await session.get(loads)).json())["loads"][0]["num_running_reqs"]:
                await asyncio.sleep(0.2)

    bench.run(check())


def test_a_patch_that_does_not_fit_ends_in_all_weights(bench):
    """The server answers with an error but stays alive, and it holds the right weights before it continues."""
    engine, published = bench.engine, bench.published

    async def check():
        whole = engine.stats()["whole_updates"]
        published.step()  # not loaded: the patch of the next one lacks what has changed here
        update = published.step()
        engine._held.state.buffer[:] = update.state.buffer
        await engine.load(update)
        assert engine.stats()["whole_updates"] == whole + 1
        assert engine._servers[0].digest == update.digest
        (prompt,) = prompts_of(9, seed=9)
        assert_sampled_by(published.models, prompt, await generate(engine, prompt, 10))

    bench.run(check())
