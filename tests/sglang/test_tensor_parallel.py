"""One server over two processes (`tp_size: 2`): patches reach every shard in flight, and both agree on the digest."""

import asyncio

import pytest

from tests.sglang.servers import (
    Published,
    assert_sampled_by,
    engine_for,
    generate,
    prompts_of,
    serving,
    slow_down,
)

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_patches_reach_every_shard_under_requests(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    published = Published(kind)

    async def check():
        async with serving(engine_for(published, tmp_path, tp_size=2)) as engine:
            await engine.load(published.update())
            whole = engine.stats()["whole_updates"]
            await slow_down(engine, 0.02)
            prompts = prompts_of(4, 9, 17, 30)
            asked = [asyncio.create_task(generate(engine, each, 40, key=n)) for n, each in enumerate(prompts)]
            models = {published.version: published.frozen()}
            for _ in range(4):
                await asyncio.sleep(0.1)
                update = published.step()
                await engine.load(update)
                models[published.version] = published.frozen()
                assert engine._servers[0].digest == update.digest
            done = await asyncio.gather(*asked)
            for _ in range(3):
                update = published.step(share=0.005)
                await engine.load(update)
                assert engine._servers[0].digest == update.digest
            stats = engine.stats()
            assert (stats["whole_updates"], stats["restarts"]) == (whole, 0)
            assert engine._servers[0].ranks == 2
            return prompts, done, models

    prompts, done, models = asyncio.run(check())
    assert_sampled_by(models, prompts, done)
