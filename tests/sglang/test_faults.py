"""Servers that crash, can't start, or outlive an actor."""

import asyncio
import os
import signal
import sys
import time

import psutil
import pytest

from tests.actors.tiny_models import greedy_of
from tests.sglang.servers import Published, engine_for, generate, prompts_of, serving, slowed

pytestmark = pytest.mark.integration


def test_a_server_that_is_killed_comes_back_with_the_newest_weights(tmp_path):
    """Running requests are answered all the same, and the new server starts with the newest weights."""
    published = Published("qwen2")

    async def check():
        async with serving(engine_for(published, tmp_path), published) as engine:
            prompts = prompts_of(5, 6, 7, 8)
            async with slowed(engine, 0.05):
                asked = [asyncio.create_task(generate(engine, each, 40, 0)) for each in prompts]
                await asyncio.sleep(0.5)
                os.kill(engine._servers[0].pid, signal.SIGKILL)
                await asyncio.sleep(0.5)
                await engine.load(published.step(share=0.3))  # it is not there: it gets them when it is
                done = await asyncio.wait_for(asyncio.gather(*asked), 240)
            for prompt, completion in zip(prompts, done, strict=True):
                assert completion.runs == [(1, 40)], "what the dead server had sampled is lost"
                assert completion.tokens.tolist() == greedy_of(published.model, prompt, 40).tolist()
            assert engine.stats()["restarts"] == 1
            assert engine._servers[0].digest == engine.digest

    asyncio.run(check())


def test_a_server_that_can_not_start_says_why(tmp_path):
    async def check():
        engine = engine_for(Published("qwen2"), tmp_path, server={"attention-backend": "no_such_backend"})
        try:
            await asyncio.wait_for(engine.watch(), 200)
        finally:
            await engine.close()

    with pytest.raises(RuntimeError, match="ended before it was ready") as raised:
        asyncio.run(check())
    assert "no_such_backend" in str(raised.value), "the tail of its log"


ACTOR = """
import asyncio, pathlib, sys
from tests.sglang.servers import Published, engine_for

engine = engine_for(Published("qwen2"), pathlib.Path(sys.argv[1]))
asyncio.run(engine.watch())
"""


def test_a_server_dies_with_an_actor_that_is_killed(tmp_path):
    actor = psutil.Popen([sys.executable, "-c", ACTOR, str(tmp_path)])

    def servers():
        return [each for each in actor.children(recursive=True) if "sglang" in " ".join(each.cmdline())]

    def alive():
        listed = psutil.process_iter(["status"])
        return {each.pid for each in listed if each.info["status"] != psutil.STATUS_ZOMBIE} & family

    deadline = time.monotonic() + 200
    while len(servers()) < 3:  # until it has processes of its own
        assert time.monotonic() < deadline and actor.poll() is None
        time.sleep(0.2)
    family = {each.pid for each in servers()}
    actor.kill()
    actor.wait()
    while alive():
        assert time.monotonic() < deadline
        time.sleep(0.1)
