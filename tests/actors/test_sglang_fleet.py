"""Requests that servers put back for lack of memory, and on which server they run next; with fakes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors.engines import sglang_engine, sglang_flags
from actors.engines.sglang_engine import SglangEngine
from actors.engines.sglang_flags import Wanted
from actors.engines.sglang_fleet import retracted
from areal_like.types import Limits
from tests.actors.sglang_fakes import PROMPT, Fakes, served, tiny, until, update, watched


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(monkeypatch)


def test_a_server_that_dies_too_often_ends_the_engine(fakes: Fakes, tmp_path: Path) -> None:
    engine = served(tmp_path, max_restarts=1)
    fakes.quick = True

    async def scenario() -> None:
        fakes.die(engine._servers[0])
        await until(lambda: engine.stats()["restarts"] == 1 and engine._servers[0].ready.is_set())
        await engine.load(update(engine, 1))
        assert (await engine.generate(PROMPT, Limits(5))).runs == [(1, 5)]
        fakes.die(engine._servers[0])
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match=r"SGLang 0 has died \(2 times\)"):
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
    engine = served(tmp_path, replicas=1, slots=8)
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


@pytest.mark.parametrize(("gpus", "first"), [(1, ["0", "1"]), (2, ["0", "2"])])
def test_servers_share_the_slots_and_each_has_devices_of_its_own(
    fakes: Fakes, tmp_path: Path, gpus: int, first: list[str]
) -> None:
    engine = served(tmp_path, tp_size=gpus)

    async def scenario() -> None:
        starts = [told for _, kind, told in fakes.events if kind == "start"]
        assert [f"--base-gpu-id {each}" in told for each, told in zip(first, starts, strict=True)] == [True, True]
        assert all(f"--tp-size {gpus}" in told and "--max-running-requests 2" in told for told in starts)
        assert engine.stats()["tp_size"] == gpus

    asyncio.run(watched(engine, scenario))


def test_replicas_begin_at_gpus_of_their_own(tmp_path: Path) -> None:
    def first_gpus(device: str, **more: Any) -> list[str]:
        commands, _ = sglang_flags.commands(tiny(), tmp_path, Wanted(device, None, 2, 8, more), 3)
        told = [" ".join(arguments) for arguments in commands]
        return [each.split("--base-gpu-id ")[1].split()[0] if "--base-gpu-id" in each else "" for each in told]

    assert first_gpus("cuda") == ["0", "2", "4"]
    with pytest.raises(ValueError, match="base-gpu-id: the engine sets that itself"):
        first_gpus("cuda", **{"base-gpu-id": 5})
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
