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
    slowed,
)

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_patches_reach_every_shard_under_requests(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    published = Published(kind)

    async def check():
        async with serving(engine_for(published, tmp_path, tp_size=2), published) as engine:
            whole, prompts = engine.stats()["whole_updates"], prompts_of(4, 9, 17, 30)
            async with slowed(engine, 0.02):
                asked = [asyncio.create_task(generate(engine, each, 40, key=n)) for n, each in enumerate(prompts)]
                for share in (0.02, 0.005, 0.02, 0.005):
                    await asyncio.sleep(0.1)
                    update = published.step(share)
                    await engine.load(update)
                    assert engine._servers[0].digest == update.digest
                done = await asyncio.gather(*asked)
            stats = engine.stats()
            assert (stats["whole_updates"], stats["restarts"], engine._servers[0].ranks) == (whole, 0, 2)
            assert any(len(completion.runs) > 1 for completion in done)
            for prompt, completion in zip(prompts, done, strict=True):
                assert_sampled_by(published.models, prompt, completion)

    asyncio.run(check())
