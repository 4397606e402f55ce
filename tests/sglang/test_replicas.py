"""Two servers behind one engine: updates reach both, and cut sequences continue on either."""

import asyncio

import numpy as np
import pytest

from tests.actors.tiny_models import greedy_of
from tests.sglang.servers import assert_sampled_by, bench_for, generate, prompts_of, slowed

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    yield from bench_for("qwen2", tmp_path_factory.mktemp("replicas"), replicas=2)


def test_updates_reach_both_servers_and_a_cut_sequence_goes_on_on_either(bench):
    engine, published = bench.engine, bench.published

    async def check():
        prompts, whole = prompts_of(5, 6, 7, 8, seed=3), engine.stats()["whole_updates"]
        async with slowed(engine, 0.05):
            calls = (generate(engine, each, 400, request=str(n)) for n, each in enumerate(prompts))
            asked = [asyncio.create_task(call) for call in calls]
            async with asyncio.timeout(60):
                while min(server.load for server in engine._servers) < 2:
                    await asyncio.sleep(0.01)
            for _ in range(3):
                await asyncio.sleep(0.2)
                update = published.step()
                await engine.load(update)
                assert {server.digest for server in engine._servers} == {update.digest}
            await asyncio.sleep(0.2)
            engine.abort("0123")
            parts = await asyncio.gather(*asked)
        assert engine.stats()["whole_updates"] == whole, "each by a patch"
        for prompt, part in zip(prompts, parts, strict=True):
            assert len(part.runs) > 1
            assert_sampled_by(published.models, prompt, part)
        so_far = [np.concatenate([prompt, part.tokens]) for prompt, part in zip(prompts, parts, strict=True)]
        for out_of_service in engine._servers:
            out_of_service.ready.clear()  # so that each goes on on the other one, too
            try:
                rests = await asyncio.gather(*(generate(engine, each, 10, 0) for each in so_far))
            finally:
                out_of_service.ready.set()
            for tokens, rest in zip(so_far, rests, strict=True):
                np.testing.assert_array_equal(rest.tokens, greedy_of(published.model, tokens, 10))

    bench.run(check())
