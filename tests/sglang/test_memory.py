"""A server whose memory for keys and values runs out."""

import asyncio

import numpy as np
import pytest

from tests.sglang.servers import VOCAB, Published, engine_for, generate, logprobs_of, prompts_of, serving, slow_down

pytestmark = pytest.mark.integration


def test_fewer_requests_go_to_a_server_whose_memory_runs_out(tmp_path):
    """Room for three of eight, and SGLang is told to be optimistic: it has to put sequences back. (It plans better for
    requests without a stop token, or many at once. The stop token here is never sampled.)"""
    published = Published("qwen2")
    short = {"max-total-tokens": 700, "schedule-conservativeness": 0.05}

    async def check():
        engine = engine_for(published, tmp_path, slots=8, server=short)
        async with serving(engine):
            await engine.load(published.update())
            await slow_down(engine, 0.01)
            limits = [engine.stats()["limit"]]
            prompts, asked = prompts_of(*range(4, 16)), []
            for n, each in enumerate(prompts):
                asked.append(asyncio.create_task(generate(engine, each, 200, key=n, stop=[VOCAB + 1])))
                await asyncio.sleep(0.1)
            while not all(each.done() for each in asked):
                limits.append(engine.stats()["limit"])
                await asyncio.sleep(0.2)
            done = await asyncio.gather(*asked)
            assert engine.stats()["preemptions"] > 0 and limits[0] == 8 and min(limits) <= 4
            lowest = engine.stats()["limit"]
            async with asyncio.timeout(30):
                while engine.stats()["limit"] < min(8, lowest + 2):
                    await asyncio.sleep(0.2)
            return prompts, done

    prompts, done = asyncio.run(check())
    for prompt, completion in zip(prompts, done, strict=True):
        assert len(completion.tokens) == 200 and completion.runs == [(0, 200)]
        assert np.abs(completion.logprobs - logprobs_of(published.model, prompt, completion.tokens)).max() < 1e-3
