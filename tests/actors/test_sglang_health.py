"""SGLang servers that are not there, or stand still: what is told, and what is done."""

import asyncio
from pathlib import Path

import pytest

from actors.engines import sglang_engine
from actors.engines.sglang_server import Server, ServerGone
from areal_like.types import Limits
from tests.actors.sglang_fakes import PROMPT, Fakes, planned, until


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(monkeypatch)


def test_waiting_for_a_server_is_not_busy(fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, and while a server that has died is started again: told in words, and no time of work."""
    engine = planned(tmp_path, replicas=1, max_tp_size=None)
    clock, let_start = 0.0, asyncio.Event()
    start = Server.start

    async def held(server: Server, timeout: float) -> None:
        await let_start.wait()
        await start(server, timeout)

    monkeypatch.setattr(Server, "start", held)
    monkeypatch.setattr(sglang_engine, "monotonic", lambda: clock)

    async def check() -> None:
        nonlocal clock
        watch = asyncio.create_task(engine.watch())
        asked = asyncio.create_task(engine.generate(PROMPT, Limits(5)))
        up = asyncio.create_task(engine.until_up())
        await until(lambda: engine.stats()["waiting"] == 1)
        clock = 100.0
        assert engine.condition == ("starting", "its SGLang server is starting") and not up.done()
        assert engine.stats()["busy_seconds"] == 0
        let_start.set()
        (server,) = engine._servers
        await until(lambda: server.load == 1)
        assert engine.condition == ("serving", "") and engine.stats()["busy_seconds"] == 0
        await up
        clock = 107.0
        assert engine.stats()["busy_seconds"] == 7
        let_start.clear()
        fakes.die(server)
        for each in fakes._waiting[server.name]:
            each.set_exception(ServerGone("has died"))
        await until(lambda: server.load == 0 and not server.ready.is_set())
        clock = 207.0
        assert engine.condition == ("restarting", "its SGLang server has died, restarting")
        assert engine.stats()["busy_seconds"] == 7
        fakes.quick = True
        let_start.set()
        await asked
        assert engine.condition == ("serving", "")
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await engine.close()

    asyncio.run(check())
