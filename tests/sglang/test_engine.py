"""One server per architecture: tokens, logprobs and versions against transformers, through many in-flight updates."""

import asyncio
from functools import partial

import aiohttp
import numpy as np
import pytest

from areal_like.models.causal_lm import write_state
from areal_like.types import Batch, Group, Limits, Sample
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo
from tests.sglang.servers import (
    CONFIGS,
    Published,
    engine_for,
    experts_of,
    generate,
    greedy_of,
    logprobs_of,
    prompts_of,
    serving,
    slow_down,
)

pytestmark = pytest.mark.integration


class Bench:
    """A running engine, the model that it serves, and the event loop of both."""

    def __init__(self, runner, stack, engine, published):
        self.run, self.stack, self.engine, self.published = runner.run, stack, engine, published

    @property
    def model(self):
        return self.published.model


@pytest.fixture(scope="module", params=list(CONFIGS))
def bench(request, tmp_path_factory):
    published = Published(request.param)
    with asyncio.Runner() as runner:

        async def begin():
            folder, moe = tmp_path_factory.mktemp(request.param), request.param == "qwen3_moe"
            engine = engine_for(published, folder, return_experts=moe)
            stack = serving(engine)
            await stack.__aenter__()
            await engine.load(published.update())
            return engine, stack

        engine, stack = runner.run(begin())
        try:
            yield Bench(runner, stack, engine, published)
        finally:
            runner.run(stack.__aexit__(None, None, None))


def test_greedy_tokens_are_those_of_transformers(bench):
    async def check():
        prompts = prompts_of(1, 5, 17, 40)
        done = await asyncio.gather(*(generate(bench.engine, each, 24, temperature=0) for each in prompts))
        for prompt, completion in zip(prompts, done, strict=True):
            assert completion.tokens.tolist() == greedy_of(bench.model, prompt, 24)
            assert completion.finish == "length"

    bench.run(check())


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_are_the_learners(bench, temperature):
    async def check():
        prompts = prompts_of(3, 9, 30, seed=2)
        done = await asyncio.gather(*(generate(bench.engine, each, 20, temperature) for each in prompts))
        for prompt, completion in zip(prompts, done, strict=True):
            expected = logprobs_of(bench.model, prompt, completion.tokens, temperature or 1.0)
            assert np.abs(completion.logprobs - expected).max() < 1e-3

    bench.run(check())


def test_experts_come_back_and_are_those_that_the_model_itself_chooses(bench):
    """Also behind an abort, and behind a kept prompt; not for evaluations."""
    engine, prompt = bench.engine, prompts_of(17, seed=21)[0]

    async def check():
        whole = await generate(engine, prompt, 20)
        if bench.model.config.model_type != "qwen3_moe":
            assert whole.experts is None
            return
        rest = await engine.generate(prompt, Limits(8, experts_from=5))
        for done, first in ((whole, 0), (rest, 5)):
            expected = experts_of(bench.model, [*prompt, *done.tokens])[first:]
            assert done.experts.dtype == np.uint8
            np.testing.assert_array_equal(np.sort(done.experts, -1), expected)
        await slow_down(engine, 0.05)
        asked = asyncio.create_task(generate(engine, prompt, 30, request="cut"))
        await asyncio.sleep(0.6)
        engine.abort(["cut"])
        cut = await asyncio.wait_for(asked, 10)
        await slow_down(engine, 0)
        assert 0 < len(cut.tokens) < 30
        expected = experts_of(bench.model, [*prompt, *cut.tokens])
        np.testing.assert_array_equal(np.sort(cut.experts, -1), expected)
        assert (await engine.generate(prompt, Limits(4, trained=False))).experts is None

    bench.run(check())


def test_fifty_updates_under_sixteen_requests(bench):
    """Each update is applied in flight as a patch, the server compares its digest, and every token's logprob is that of
    the version it is recorded under (with `retract`, the KV cache keeps nothing of older weights)."""
    engine, published, at = bench.engine, bench.published, {}

    async def request(i, going):
        while going:
            prompt = prompts_of(4 + i % 5, seed=i)[0]
            completion = await generate(engine, prompt, 24, request=f"r{i}", key=i)
            if not all(version in at for version, _ in completion.runs):
                continue
            start = 0
            for version, count in completion.runs:
                expected = logprobs_of(at[version], prompt, completion.tokens)[start : start + count]
                assert np.abs(completion.logprobs[start : start + count] - expected).max() < 1e-3, completion.runs
                start += count
            seen.update([len(completion.runs)])

    async def check():
        before, whole = engine.stats(), engine.stats()["whole_updates"]
        await slow_down(engine, 0.005)
        going = [True]
        requests = [asyncio.create_task(request(i, going)) for i in range(16)]
        for _ in range(50):
            await asyncio.sleep(0.05)
            update = published.step()
            at[update.version] = published.frozen()
            await engine.load(update)
            assert (engine.version, engine.digest) == (update.version, update.digest)
            assert engine._servers[0].digest == update.digest
        going.clear()
        await asyncio.gather(*requests)
        await slow_down(engine, 0)
        stats = engine.stats()
        assert stats["whole_updates"] == whole, "patches were enough"
        assert stats["pauses"] - before["pauses"] >= 25, "the updates met requests in flight"

    from collections import Counter

    seen = Counter()
    bench.run(check())
    assert sum(count for runs, count in seen.items() if runs > 1) >= 10, f"completions of several versions: {seen}"


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_tokens_are_filed_under_the_weights_that_made_them(bench, mode):
    """The first token after an update comes from the new weights in every mode: without any old KV where the sequence
    is computed again; in any case its version marks it."""
    engine, published = bench.engine, bench.published

    async def check():
        engine._mode = mode
        old, before = published.frozen(), published.version
        await slow_down(engine, 0.05)
        prompts = prompts_of(5, 6, 7, seed=5)
        asked = [asyncio.create_task(generate(engine, each, 30)) for each in prompts]
        await asyncio.sleep(0.5)
        await engine.load(published.step(share=0.3))
        done = await asyncio.gather(*asked)
        await slow_down(engine, 0)
        engine._mode = "retract"
        for prompt, completion in zip(prompts, done, strict=True):
            (first, count), (second, rest) = completion.runs
            assert (first, second, count + rest) == (before, published.version, 30)
            expected = logprobs_of(old, prompt, completion.tokens)
            assert np.abs(completion.logprobs - expected)[:count].max() < 1e-3
            assert np.abs(completion.logprobs - expected)[count:].max() > 1e-3, "old weights after the update"
            if mode != "in_place":
                anew = logprobs_of(published.model, prompt, completion.tokens)
                assert np.abs(completion.logprobs - anew)[count:].max() < 1e-3

    bench.run(check())


def test_what_is_kept_of_prompts_is_not_used_under_newer_weights(bench):
    """Also with `in_place`, where the server can't drop its cache."""
    engine, published = bench.engine, bench.published

    async def check():
        prompt = prompts_of(40, seed=6)[0]
        engine._mode = "in_place"
        try:
            await generate(engine, prompt, 4)
            await engine.load(published.step(share=0.3))
            completion = await generate(engine, prompt, 8)
            again = await generate(engine, prompt, 8)
        finally:
            engine._mode = "retract"
        for each in (completion, again):
            assert np.abs(each.logprobs - logprobs_of(published.model, prompt, each.tokens)).max() < 1e-3

    bench.run(check())


def test_what_a_request_leaves_while_an_update_begins_is_not_used_under_the_newer_weights(bench, monkeypatch):
    """The request arrives after `load` begins and before the server pauses: old weights compute its prompt."""
    engine, published = bench.engine, bench.published
    server = engine._servers[0]
    post = server.post

    async def check():
        prompt = prompts_of(40, seed=16)[0]

        async def post_later(path, body):
            if path == "/pause_generation":
                monkeypatch.setattr(server, "post", post)
                assert (await generate(engine, prompt, 2)).runs == [(before, 2)]
            return await post(path, body)

        monkeypatch.setattr(engine, "_mode", "in_place")
        monkeypatch.setattr(server, "post", post_later)
        before = published.version
        await engine.load(published.step(share=0.3))
        completion = await generate(engine, prompt, 8)
        assert completion.runs == [(published.version, 8)]
        assert np.abs(completion.logprobs - logprobs_of(published.model, prompt, completion.tokens)).max() < 1e-3

    bench.run(check())


def test_aborted_requests_bring_back_what_there_is_and_can_go_on(bench):
    engine = bench.engine

    async def check():
        prompt, other = prompts_of(5, 6, seed=8)
        whole = greedy_of(bench.model, prompt, 30)
        await slow_down(engine, 0.05)
        asked = asyncio.create_task(generate(engine, prompt, 30, 0, request="1"))
        stays = asyncio.create_task(generate(engine, other, 30, 0, request="10"))
        await asyncio.sleep(0.6)
        engine.abort(["1"])
        part = await asyncio.wait_for(asked, 10)
        assert part.finish == "abort"
        assert 0 < len(part.tokens) < 30
        assert part.tokens.tolist() == whole[: len(part.tokens)]
        assert len(part.logprobs) == len(part.tokens) == sum(count for _, count in part.runs)
        cancelled = asyncio.create_task(generate(engine, prompt, 500, 0))
        await asyncio.sleep(0.3)
        cancelled.cancel()
        assert (await stays).finish == "length"
        await slow_down(engine, 0)
        rest = await generate(engine, np.concatenate([prompt, part.tokens]), 30 - len(part.tokens), 0)
        assert [*part.tokens, *rest.tokens] == whole
        while engine._errands:
            await asyncio.sleep(0.05)
        async with asyncio.timeout(20):  # the server's slots are free: it would be busy for long
            async with aiohttp.ClientSession() as session:
                while (await (await session.get(engine._servers[0].url + "/v1/loads")).json())["loads"][0][
                    "num_running_reqs"
                ]:
                    await asyncio.sleep(0.2)

    bench.run(check())


def test_train_steps_reach_the_server(bench):
    """The learner trains on the server's samples, and its own logprobs agree; the server follows the weights."""
    engine, published = bench.engine, bench.published
    learner = TorchLearner(published.frozen(), decoupled_ppo, partial(group), 1.0, 0, lr=3e-3)

    async def sampled(index, prompt):
        done = await asyncio.gather(*(generate(engine, prompt, 12, key=10 * index + i) for i in range(4)))
        samples = []
        for each in done:
            tokens, mask = np.concatenate([prompt, each.tokens]), np.ones(len(each.tokens), bool)
            reward = float(np.mean(each.tokens % 2))
            samples.append(Sample(tokens, len(prompt), each.logprobs, mask, each.runs, reward, each.finish))
        return Group(index, samples, {engine.version: engine.digest})

    async def check():
        whole = engine.stats()["whole_updates"]
        for step in range(3):
            prompts = prompts_of(5, 9, seed=20 + step)
            groups = [await sampled(2 * step + i, prompt) for i, prompt in enumerate(prompts)]
            rows = learner.train(Batch(step, published.version, groups))
            assert rows["grad_norm"] > 0 and abs(rows["mismatch_kl"]) < 1e-6 and rows["mismatch_max"] < 1e-3
            write_state(learner.snapshot(), dict(published.model.named_parameters()))
            published.version += 1
            await engine.load(published.update())
            completion = await generate(engine, prompts[0], 12)
            expected = logprobs_of(published.model, prompts[0], completion.tokens)
            assert np.abs(completion.logprobs - expected).max() < 1e-3
        assert engine.stats()["whole_updates"] == whole

    bench.run(check())


def test_a_patch_that_does_not_fit_ends_in_all_weights(bench):
    """The server answers with an error but stays alive, and it holds the right weights before it continues."""
    engine, published = bench.engine, bench.published

    async def check():
        whole = engine.stats()["whole_updates"]
        published.step()  # never told: the patch of the next one lacks what has changed here
        update = published.step()
        engine._held.state.buffer[:] = update.state.buffer
        await engine.load(update)
        assert engine.stats()["whole_updates"] == whole + 1
        assert engine._servers[0].digest == update.digest
        prompt = prompts_of(9, seed=9)[0]
        completion = await generate(engine, prompt, 10)
        assert np.abs(completion.logprobs - logprobs_of(published.model, prompt, completion.tokens)).max() < 1e-3

    bench.run(check())
