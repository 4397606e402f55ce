"""Servers that are exchanged for others with another tensor parallelism: what happens in which order, with fakes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors.engines import sglang_engine, sglang_flags
from actors.engines.sglang_engine import SglangEngine
from actors.engines.sglang_flags import Wanted
from actors.engines.sglang_fleet import retracted
from areal_like.types import Completion, Limits
from tests.actors.sglang_fakes import PROMPT, Fakes, planned, tiny, until, update, watched


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(monkeypatch)


def test_servers_are_exchanged_between_an_update_and_its_first_token(fakes: Fakes, tmp_path: Path) -> None:
    engine = planned(tmp_path)

    async def scenario() -> None:
        await engine.load(update(engine, 1))
        asked = [asyncio.create_task(engine.generate(PROMPT, Limits(5))) for _ in range(4)]
        await until(lambda: sum(server.load for server in engine._servers) == 4)
        fakes.preempted["SGLang 1"] = 1
        fakes.events.clear()
        await engine.load(update(engine, 2))
        assert fakes.order("give") == [], "servers that are to be ended get no weights"
        assert (
            fakes.order("abort", "answer")
            == [("0", "abort"), ("1", "abort")] + [("0", "answer")] * 2 + [("1", "answer")] * 2
        )
        fakes.quick = True
        done: list[Completion] = await asyncio.gather(*asked)
        assert fakes.order("kill", "start", "give") == [("0", "kill"), ("1", "kill"), ("0", "start"), ("0", "give")]
        assert [name for name, kind, _ in fakes.events[-8:]] == ["SGLang 0"] * 8, "asked only after that, of the one"
        for completion in done:
            assert completion.tokens.tolist() == [5, 6, 7, 7, 7], "they go on from what they had"
            assert completion.runs == [(1, 2), (2, 3)]
        told = next(arguments for _, kind, arguments in fakes.events if kind == "start")
        assert "--tp-size 2" in told and "--max-running-requests 4" in told and "--base-gpu-id 0" in told
        stats = engine.stats()
        assert [stats[name] for name in ("tp_size", "replans", "restarts", "preemptions")] == [2, 1, 0, 1]
        fakes.events.clear()
        for version in range(3, 7):  # in peace
            await engine.generate(PROMPT, Limits(5))
            await engine.load(update(engine, version))
        await until(lambda: all(server.ready.is_set() for server in engine._servers))
        order = fakes.order("kill", "start", "give")[-5:]
        assert order[0] == ("0", "kill")
        for i in "01":
            assert [each for each in order[1:] if each[0] == i] == [(i, "start"), (i, "give")]
        starts = [told for _, kind, told in fakes.events if kind == "start"]
        assert all("--tp-size 1" in told and "--max-running-requests 2" in told for told in starts)
        assert ["--base-gpu-id 0" in told for told in starts] == [True, False] and "--base-gpu-id 1" in starts[1]
        assert engine.stats()["tp_size"] == 1 and engine.stats()["replans"] == 2
        assert (await engine.generate(PROMPT, Limits(5))).runs == [(6, 5)]

    asyncio.run(watched(engine, scenario))


def test_an_exchange_does_not_count_as_a_failure_and_what_is_left_of_them_counts_on(
    fakes: Fakes, tmp_path: Path
) -> None:
    engine = planned(tmp_path, max_restarts=1)
    fakes.quick = True

    async def scenario() -> None:
        for version in range(1, 12):  # up, and down after four steps of peace, and up
            await engine.generate(PROMPT, Limits(5))
            fakes.preempted["SGLang 0"] += version in (1, 6)
            await engine.load(update(engine, version))
            await until(lambda: any(server.ready.is_set() for server in engine._servers))
        stats = engine.stats()
        assert (stats["replans"], stats["restarts"]) == (4, 0)
        fakes.die(engine._servers[0])
        await until(lambda: engine.stats()["restarts"] == 1 and engine._servers[0].ready.is_set())
        await engine.generate(PROMPT, Limits(5))
        fakes.preempted["SGLang 0"] += 1
        await engine.load(update(engine, 13))
        await until(lambda: engine.stats()["tp_size"] == 2 and engine._servers[0].ready.is_set())
        fakes.die(engine._servers[0])
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match=r"SGLang 0 has died \(2 times\)"):
        asyncio.run(watched(engine, scenario))


def test_updates_that_come_while_servers_are_exchanged_are_what_those_begin_with(fakes: Fakes, tmp_path: Path) -> None:
    engine = planned(tmp_path)
    fakes.quick = True

    async def scenario() -> None:
        await engine.generate(PROMPT, Limits(5))
        fakes.preempted["SGLang 0"] = 1
        await engine.load(update(engine, 1))
        asked = asyncio.create_task(engine.generate(PROMPT, Limits(5)))
        for version in range(2, 9):
            await engine.load(update(engine, version))
        await asked
        assert engine.stats()["replans"] == 1, "steps in which no server was ready are not peace"
        assert (await engine.generate(PROMPT, Limits(5))).runs == [(8, 5)]

    asyncio.run(watched(engine, scenario))


def test_without_a_plan_nothing_is_exchanged(fakes: Fakes, tmp_path: Path) -> None:
    engine = planned(tmp_path, max_tp_size=None, tp_size=2)
    fakes.quick = True

    async def scenario() -> None:
        starts = [told for _, kind, told in fakes.events if kind == "start"]
        assert ["--base-gpu-id 0" in starts[0], "--base-gpu-id 2" in starts[1]] == [True, True]
        await engine.generate(PROMPT, Limits(5))
        fakes.preempted["SGLang 0"] = 9
        await engine.load(update(engine, 1))
        stats = engine.stats()
        assert (stats["tp_size"], stats["replans"]) == (2, 0)

    asyncio.run(watched(engine, scenario))


def test_what_a_server_put_back_before_it_was_joined_is_not_counted(fakes: Fakes, tmp_path: Path) -> None:
    engine = SglangEngine(tiny(), tmp_path, url="http://127.0.0.1:9", slots=8)
    fakes.preempted["SGLang"] = 7

    async def scenario() -> None:
        assert await engine._fleet.count() == 0
        fakes.preempted["SGLang"] += 2
        assert await engine._fleet.count() == 2

    asyncio.run(watched(engine, scenario))


def test_fewer_requests_go_to_servers_that_put_some_back_and_more_again_in_peace(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = asyncio.Queue[None]()

    async def look() -> int:
        await looks.get()
        found = await count()
        counted.append(found)
        return found

    monkeypatch.setattr(sglang_engine, "_BALANCE_SECONDS", 0)
    engine = planned(tmp_path, max_tp_size=None, replicas=1, slots=8)
    count, counted = engine._fleet.count, list[int]()
    monkeypatch.setattr(engine._fleet, "count", look)

    async def looked(preempted: int) -> None:
        fakes.preempted["SGLang 0"] += preempted
        before = len(counted)
        looks.put_nowait(None)
        await until(lambda: len(counted) > before)
        await asyncio.sleep(0)

    async def scenario() -> None:
        (server,) = engine._servers
        asked = [asyncio.create_task(engine.generate(PROMPT, Limits(5))) for _ in range(12)]
        await until(lambda: server.load == 8)
        await looked(3)
        await until(lambda: engine.stats()["limit"] == 4)
        assert engine.stats()["preemptions"] == 3 and server.load == 8, "those that run keep their places"
        fakes.quick = True
        await fakes.post(server, "/abort_request", {"abort_all": True})
        await asyncio.gather(*asked)
        fakes.quick = False
        asked = [asyncio.create_task(engine.generate(PROMPT, Limits(2))) for _ in range(12)]
        await until(lambda: server.load == 4)
        for peaceful in range(1, 6):
            await looked(0)
            limit = min(8, 4 + peaceful)
            await until(lambda limit=limit: engine.stats()["limit"] == server.load == limit)
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: server.load == 0)

    asyncio.run(watched(engine, scenario))


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"url": "http://127.0.0.1:9", "replicas": 1}, "joined"),
        ({"max_tp_size": 3, "replicas": 3}, "times 1, 2, 4, 8"),
        ({"max_tp_size": 3, "tp_size": 2}, "times 1, 2, 4, 8"),
        ({"max_tp_size": 1, "tp_size": 2}, "times 1, 2, 4, 8"),
        ({"max_tp_size": 4}, "divisible by 4"),
        ({"max_tp_size": 2, "replicas": 3}, "divisible by 2"),
        ({"max_tp_size": 8, "replicas": 8}, "attention heads"),
        ({"server": {"base_gpu_id": 1}}, "base-gpu-id"),
        ({"server": {"enable-metrics": False}}, "enable-metrics"),
    ],
)
def test_plans_that_can_not_be_are_refused(knobs: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=why):
        planned(tmp_path, **knobs)


def test_replicas_begin_at_gpus_of_their_own(tmp_path: Path) -> None:
    def first_gpus(device: str, **more: Any) -> list[str]:
        layouts, _ = sglang_flags.layouts(tiny(), tmp_path, Wanted(device, None, 2, 8, more), 3, None)
        told = [" ".join(arguments or []) for arguments in layouts[2]]
        return [each.split("--base-gpu-id ")[1].split()[0] if "--base-gpu-id" in each else "" for each in told]

    assert first_gpus("cuda") == ["0", "2", "4"]
    assert first_gpus("cuda", **{"base-gpu-id": 5}) == ["5", "5", "5"], "as the user says"
    assert first_gpus("cpu") == ["", "", ""]


def test_only_the_counter_of_what_memory_has_cost_is_read() -> None:
    text = """# HELP sglang:num_retracted_requests_total Total number of retracted requests.
# TYPE sglang:num_retracted_requests_total counter
sglang:num_retracted_reqs{tp_rank="0"} 9.0
sglang:num_retracted_input_tokens_total{tp_rank="0"} 900.0
sglang:num_retracted_requests_total{model_name="a b",tp_rank="0"} 7.0
sglang:num_retracted_requests_total{model_name="a b",tp_rank="1"} 7.0
"""
    assert (retracted(text), retracted("")) == (7, 0)
