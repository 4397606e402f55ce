"""The timer of verifiers that run in the actor, beside other users of the same timer."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from actors.reward_pool import RewardError, RewardPool
from actors.rewards import reward_function
from actors.time_limit import Overtime, within
from areal_like.places import REPOSITORY
from areal_like.tasks.copying import Copy

TERMINATED = """
import asyncio, os, signal, time
from actors.time_limit import within
from areal_like.run.process import Orders

async def quick():
    return 1.0

async def told_to_end():
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        pass

async def main():
    Orders().on_end(lambda: None, 1)
    await within(60, 60, quick())
    if {within_a_step}:
        await within(60, 60, told_to_end())
    os.kill(os.getpid(), signal.SIGTERM)
    await within(60, 60, quick())
    time.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("within_a_step", [False, True])
def test_an_actor_that_was_told_to_end_ends_although_its_verifiers_are_timed(within_a_step):
    program = TERMINATED.format(within_a_step=within_a_step)
    ended = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, timeout=20, capture_output=True)
    assert ended.returncode == -signal.SIGALRM, ended.stderr.decode()


@pytest.fixture
def alarms():
    """Count the alarms that reach this test's handler, as a library may install one. (pytest's limit is one.)"""
    heard = []
    timer = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    yield heard
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *timer)


async def quick():
    await asyncio.sleep(0.001)
    return 1.0


async def spin(seconds=10.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_handler_and_a_timer_of_others_are_left_to_them(alarms):
    handler = signal.getsignal(signal.SIGALRM)
    assert asyncio.run(within(60, 60, quick())) == 1.0
    with pytest.raises(Overtime, match=r"busy for more than 0\.1 s"):
        asyncio.run(within(60, 0.1, spin()))
    assert signal.getsignal(signal.SIGALRM) is handler and signal.getitimer(signal.ITIMER_REAL)[0] == 0

    signal.setitimer(signal.ITIMER_REAL, 0.2)
    assert asyncio.run(within(60, 60, quick())) == 1.0
    asyncio.run(within(60, 60, spin(0.4)))  # theirs is due first
    assert alarms == [signal.SIGALRM]

    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(Overtime):
        asyncio.run(within(60, 0.1, spin()))
    until = time.monotonic() + 10
    while len(alarms) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert alarms == [signal.SIGALRM] * 2


def test_a_verifier_may_have_an_alarm_of_its_own(alarms):
    async def own():
        before = signal.signal(signal.SIGALRM, lambda number, frame: alarms.append("own"))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        await spin(0.2)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return 1.0

    assert asyncio.run(within(60, 60, own())) == 1.0
    until = time.monotonic() + 10
    while len(alarms) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert alarms == ["own", signal.SIGALRM]


@pytest.mark.parametrize("hangs", [False, True])
def test_a_verifier_need_not_be_a_coroutine_function(hangs):
    class Plain(Copy):
        def reward(self, prompt, tokens):
            while hangs:
                pass
            return asyncio.get_running_loop().run_in_executor(None, lambda: 0.5)

    async def test():
        pool, task = RewardPool(), Plain(0, digits=4)
        reward = reward_function(task, pool, step_timeout=0.2)
        assert await reward(task.prompt("train", 0), np.array([3], np.int32)) == (0.0 if hangs else 0.5)

    asyncio.run(test())


def test_without_a_limit_or_workers_a_verifier_in_this_process_takes_its_time():
    """`rewards.workers=0`: for debugging a verifier step by step."""

    async def slow():
        time.sleep(0.01)
        await asyncio.sleep(0.01)
        return signal.getitimer(signal.ITIMER_REAL)

    before = signal.setitimer(signal.ITIMER_REAL, 0)
    assert asyncio.run(within(math.inf, math.inf, slow())) == (0.0, 0.0)
    signal.setitimer(signal.ITIMER_REAL, *before)

    async def pooled():
        pool = RewardPool(workers=0)
        with pytest.raises(RewardError, match="SystemExit"):
            await pool.score("sys:exit")
        return await pool.score("os:getpid")

    assert asyncio.run(pooled()) == os.getpid()
