"""One server over two processes (`tp_size: 2`): patches reach every shard in flight, and both agree on the digest. One
that was joined gets each byte once."""

import asyncio

import numpy as np
import pytest

from tests.sglang.servers import (
    Published,
    assert_sampled_by,
    engine_for,
    generate,
    logprobs_of,
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
            swept = engine.stats()["swept_updates"]
            for _ in range(3):
                update = published.step(share=0.005)
                await engine.load(update)
                assert engine._servers[0].digest == update.digest
            stats = engine.stats()
            assert stats["swept_updates"] == swept, "few changes are followed"
            assert (stats["whole_updates"], stats["unchecked_updates"], stats["restarts"]) == (whole, 0, 0)
            assert engine._servers[0].ranks == 2
            await joined(kind, engine._servers[0].url, tmp_path)
            return prompts, done, models

    prompts, done, models = asyncio.run(check())
    assert_sampled_by(models, prompts, done)


async def joined(kind, url, folder):
    """Another engine joins the server: all of its weights, and then a patch, go there in slices for the two ranks."""
    published, sent = Published(kind), []
    published.step(share=0.5)
    engine = engine_for(published, folder / "none", url=url)
    (server,) = engine._servers
    post = server.post

    async def counted(path, body, extra=0.0):
        sent.append(sum(len(each) for each in body.get("serialized_named_tensors", ())))
        return await post(path, body, extra)

    server.post = counted
    async with serving(engine):
        whole, nbytes = sum(sent), published.update().state.nbytes
        await engine.load(published.step())
        prompt = prompts_of(9)[0]
        done = await generate(engine, prompt, 10)
        stats = engine.stats()
        assert (stats["whole_updates"], stats["unchecked_updates"]) == (1, 0)
        assert done.runs == [(published.version, 10)]
        assert np.abs(done.logprobs - logprobs_of(published.model, prompt, done.tokens)).max() < 1e-3
        patch = stats["patch_bytes"] - nbytes
        assert whole < 1.34 * nbytes + 40_000 and sum(sent) - whole < 1.34 * patch + 4000, (
            "as base64, and what they are"
        )
