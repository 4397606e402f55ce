"""The pool with verifiers that answer, raise, hang or crash; some of them are from the standard library."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import AsyncMock

import numpy as np
import pytest

from actors.reward_pool import MachineError, NoReward, RewardError, RewardPool, RewardTimeout
from actors.rewards import reward_function
from areal_like.tasks.copying import Copy
from areal_like.tasks.sandbox import SandboxError

STUCK = ("re:match", "(a+)+$", "a" * 60 + "b")
"""Backtracks endlessly inside C, holding the interpreter lock: only a kill ends it."""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends(*pids: int) -> bool:
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


def in_pool(test, **knobs):
    async def run():
        pool = RewardPool(**knobs)
        try:
            return await test(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def test_scores_come_back_and_one_worker_serves_calls_in_turn():
    async def test(pool):
        assert await pool.score("operator:add", 1, 0.5) == 1.5
        pids = {await pool.score("os:getpid") for _ in range(3)}
        assert len(pids) == 1 and os.getpid() not in pids
        assert (pool.calls, pool.timeouts, pool.errors) == (4, 0, 0)
        return int(pids.pop())

    assert not is_alive(in_pool(test, workers=3))


def test_a_call_that_overruns_is_killed_with_all_that_it_started(tmp_path):
    async def test(pool):
        first = int(await pool.score("os:getpid"))
        with pytest.raises(RewardTimeout):
            await pool.score(*STUCK)
        assert not is_alive(first) and await pool.score("os:getpid") != first
        with pytest.raises(RewardTimeout, match="system"):
            await pool.score("os:system", f"trap '' TERM INT; sleep 3600 & echo $! > {tmp_path}/pid; wait")
        assert ends(int((tmp_path / "pid").read_text()))
        assert (pool.calls, pool.timeouts, pool.errors) == (4, 2, 0)

    in_pool(test, timeout=1.5, wall=1)


def idle(seconds: float) -> float:
    time.sleep(seconds)
    return 1.0


def busy(seconds: float) -> float:
    begin = time.process_time()
    while time.process_time() - begin < seconds:
        pass
    return 1.0


@pytest.mark.parametrize(("verifier", "is_right"), [("idle", True), ("busy", False)])
def test_a_verifier_has_a_limit_on_its_processor_time_and_a_far_one_on_wall_time(verifier: str, is_right: bool):
    """The actor is busy meanwhile, as in a prefill."""

    async def test(pool):
        worker = await pool.score("os:getpid")
        await pool.score(f"{__name__}:idle", 0.0)  # imports it
        call = asyncio.create_task(pool.score(f"{__name__}:{verifier}", 0.3))
        await asyncio.sleep(0.02)
        time.sleep(0.5)
        (found,) = await asyncio.gather(call, return_exceptions=True)
        assert found == 1.0 if is_right else isinstance(found, RewardTimeout)
        assert pool.timeouts == (not is_right) and (await pool.score("os:getpid") == worker) == is_right

    in_pool(test, timeout=0.1)


def test_an_error_fails_its_call_and_only_a_crash_needs_a_new_worker():
    async def test(pool):
        for call, words, is_crash in (
            (("operator:truediv", 1, 0), "ZeroDivisionError", False),
            (("builtins:float", "nan"), "returned nan, expected a finite number", False),
            (("no_such_module:f",), "ModuleNotFoundError", False),
            (("operator:mul", "x" * 1000, 1 << 20), "MemoryError", False),
            (("os:abort",), "worker process died", True),
            (("sys:exit",), "worker process died", True),
        ):
            worker, errors = await pool.score("os:getpid"), pool.errors
            with pytest.raises(RewardError, match=words):
                await pool.score(*call)
            assert (await pool.score("os:getpid") == worker) != is_crash, call
            assert (pool.timeouts, pool.errors) == (0, errors + 1), call

    in_pool(test, memory_limit=1 << 28)


def test_a_cancelled_call_kills_its_worker_and_frees_its_place():
    async def test(pool):
        worker = int(await pool.score("os:getpid"))
        call = asyncio.create_task(pool.score(*STUCK))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not is_alive(worker)
        assert await pool.score("operator:add", 1, 1) == 2.0

    in_pool(test)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_workers_die_with_a_killed_actor_even_when_stuck():
    code = (
        "import asyncio\nfrom actors.reward_pool import RewardPool\n"
        "async def main():\n    pool = RewardPool(workers=2, timeout=3600)\n"
        "    pids = await asyncio.gather(pool.score('os:getpid'), pool.score('os:getpid'))\n"
        f"    stuck = asyncio.create_task(pool.score(*{STUCK!r}))\n"
        "    await asyncio.sleep(0.2)\n    print(*map(int, pids), flush=True)\n    await stuck\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as actor:
        assert actor.stdout is not None
        pids = [int(pid) for pid in actor.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_alive, pids))
        actor.kill()
    assert ends(*pids)


def rewarded(task, pool, token, **knobs):
    return reward_function(task, pool, **knobs)(task.prompt("train", 0), np.array([token], np.int32))


def fails(*_):
    raise ZeroDivisionError("no")


async def no_number(*_):
    return float("nan")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("verification", fails),
        ("verification", lambda *_: ("builtins:float", ("1e300",))),
        ("reward", fails),
        ("reward", no_number),
    ],
)
def test_an_answer_whose_verifier_fails_earns_nothing_or_is_given_up(name, found):
    task = type("Faulty", (Copy,), {name: found})(0, digits=4)

    async def test(pool):
        assert await rewarded(task, pool, 3) == 0.0 and pool.unverified == 1
        for on_error in ("redraw", "drop"):
            with pytest.raises(RewardError, match=r"raised|returned") as error:
                await rewarded(task, pool, 3, on_error=on_error)
            assert error.value.redraw == (on_error == "redraw") and pool.note == str(error.value)
        assert (pool.answered, pool.unverified) == (3, 1)

    in_pool(test)


def graded(found):
    return eval(found)


@pytest.mark.parametrize("place", ["verification", "reward"])
def test_a_reward_is_a_number_or_weighted_parts_or_none(place: str) -> None:
    async def test(pool):
        for returned, weights, reward, parts in (
            ("{'form': 1, 'right': True}", {}, 2.0, {"form": 1.0, "right": 1.0}),
            ("{'form': 1, 'right': 4.0}", {"form": 0.5}, 4.5, {"form": 1.0, "right": 4.0}),
            ("0.5", {}, 0.5, {}),
            ("None", {}, NoReward, {}),
            ("None", {"form": 0.5}, NoReward, {}),
            ("{}", {}, RewardError, {}),
            ("{'a b': 1}", {}, RewardError, {}),
            ("{'form': None}", {}, RewardError, {}),
            ("{'form': float('nan')}", {}, RewardError, {}),
            ("{'form': 1e9}", {"form": 2.0}, RewardError, {}),
            ("{'form': 1}", {"from": 0.5}, RewardError, {}),
            ("1.0", {"form": 0.5}, RewardError, {}),
        ):
            here = AsyncMock(return_value=graded(returned))
            found = {"verification": lambda *_, it=returned: (f"{__name__}:graded", (it,)), "reward": here}[place]
            task = type("Graded", (Copy,), {place: found, "reward_weights": weights})(0, digits=4)
            if isinstance(reward, float):
                score = await rewarded(task, pool, 3)
                assert (score, score.parts) == (reward, parts), returned
            else:
                with pytest.raises(reward) as error:
                    await rewarded(task, pool, 3, on_error="drop")
                assert (type(error.value) is NoReward) == (reward is NoReward), returned
        assert pool.stats()["sum:rewards/unscored"] == 2

    in_pool(test, workers=1 if place == "verification" else 0)


def no_sandbox():
    raise SandboxError("none here")


def no_library(*_):
    raise ImportError("no such library")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("reward", no_library),
        ("verification", lambda *_: ("no_such_module:f", ())),
        ("verification", lambda *_: ("os:listdir", ("/no/such/folder",))),
        ("verification", lambda *_: (f"{__name__}:no_sandbox", ())),
    ],
)
def test_a_fault_of_the_machine_earns_nobody_nothing(name, found):
    """The sample is drawn again: to give it 0 would be a choice of data."""
    task = type("Faulty", (Copy,), {name: found})(0, digits=4)

    async def test(pool):
        with pytest.raises(MachineError) as error:
            await rewarded(task, pool, 3, on_error="zero")
        assert error.value.redraw and pool.unverified == 0

    in_pool(test)


def test_a_verifier_of_this_process_that_waits_too_long_earns_nothing():
    class Hanging(Copy):
        async def reward(self, prompt, tokens):
            return 1.0 if tokens[0] == 3 else await asyncio.Event().wait()

    async def test(pool):
        found = [await rewarded(Hanging(0, digits=4), pool, token, timeout=0.1) for token in (3, 4)]
        assert found == [1.0, 0.0] and (pool.timeouts, pool.unverified) == (1, 1)

    in_pool(test)
