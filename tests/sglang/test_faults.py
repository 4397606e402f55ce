"""Servers that crash, can't start, or outlive an actor."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.sglang.servers import (
    Published,
    engine_for,
    generate,
    greedy_of,
    prompts_of,
    serving,
    slow_down,
)

pytestmark = pytest.mark.integration


def family(pid):
    """The process and all of its descendants."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = dict(map(int, line.split()) for line in listed.splitlines())
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids, seconds=30):
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.1)


def test_a_server_that_is_killed_comes_back_with_the_newest_weights(tmp_path):
    """Running requests are answered all the same, and the new server starts with the newest weights. At the
    end no process is left."""
    published = Published("qwen2")

    async def check():
        engine = engine_for(published, tmp_path)
        async with serving(engine):
            await engine.load(published.update())
            await slow_down(engine, 0.05)
            prompts = prompts_of(5, 6, 7, 8)
            asked = [asyncio.create_task(generate(engine, each, 40, 0)) for each in prompts]
            await asyncio.sleep(0.5)
            first = family(engine.pids[0])
            os.kill(engine.pids[0], signal.SIGKILL)
            await asyncio.sleep(0.5)
            await engine.load(published.step(share=0.3))  # it is not there: it gets them when it is
            done = await asyncio.wait_for(asyncio.gather(*asked), 240)
            for prompt, completion in zip(prompts, done, strict=True):
                assert completion.runs == [(1, 40)], "what the dead server had sampled is lost"
                assert completion.tokens.tolist() == greedy_of(published.model, prompt, 40)
            assert engine.stats()["restarts"] == 1
            assert engine._servers[0].digest == engine.digest
            wait_until_gone(first)
            return family(engine.pids[0])

    last = asyncio.run(check())
    assert len(last) > 2, "a server has processes of its own"
    wait_until_gone(last)


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

async def main():
    engine = engine_for(Published("qwen2"), pathlib.Path(sys.argv[1]))
    watch = asyncio.create_task(engine.watch())
    await asyncio.sleep(float(sys.argv[2]))
    print(engine.pids[0], flush=True)
    await watch

asyncio.run(main())
"""


def test_a_server_dies_with_an_actor_that_is_killed(tmp_path):
    actor = subprocess.Popen(
        [sys.executable, "-c", ACTOR, str(tmp_path), "1"], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        server = int(actor.stdout.readline())
        deadline = time.monotonic() + 200
        while len(family(server)) < 3:  # until it has processes of its own
            assert time.monotonic() < deadline and actor.poll() is None
            time.sleep(0.2)
        processes = family(server)
    finally:
        actor.kill()
        actor.wait()
    wait_until_gone(processes)
