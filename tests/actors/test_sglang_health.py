"""SGLang servers that are missing or hang: what the user is told, and what the engine does."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from actors.engines import sglang_engine, sglang_patch, sglang_server, sglang_weights
from actors.engines.sglang_health import Pulse
from actors.engines.sglang_loader import APPLIED
from actors.engines.sglang_server import ServerGone, ServerRefused, SglangServer
from areal_like.types import Limits
from tests.actors.sglang_fakes import PROMPT, Fakes, served, until, update, watched


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(monkeypatch)


def test_a_connection_that_the_server_has_closed_meanwhile_is_not_used() -> None:
    """The actor stood still for longer than the server keeps an idle connection, and has not heard of its end: neither
    of one that was idle before, nor of one whose answer came meanwhile."""
    url, ended, up = "", threading.Event(), threading.Event()

    async def said(request: web.Request) -> web.Response:
        await asyncio.sleep(0.05)
        return web.json_response({"said": 1})

    async def serve() -> None:
        nonlocal url
        app = web.Application()
        app.router.add_post("/say", said)
        app.router.add_get("/ping", said)
        server = TestServer(app)
        await server.start_server(keepalive_timeout=0.1)
        url = str(server.make_url("/"))
        up.set()
        await asyncio.to_thread(ended.wait)
        await server.close()

    async def check() -> None:
        server = SglangServer("SGLang 0", url=url)
        await server.start(5)
        for _ in range(3):
            found = await asyncio.gather(*(server.post("/say", {"text": "x" * 1_000_000}) for _ in range(4)))
            assert found == [{"said": 1}] * 4
            time.sleep(0.3)  # the loop stands still
        asking = asyncio.create_task(two(server))
        await asyncio.sleep(0.02)
        time.sleep(0.4)
        assert await asking == [{"said": 1}] * 2
        await server.close()

    async def two(server: SglangServer) -> list[dict[str, Any]]:
        return [await server.post("/say", {"text": "x"}) for _ in range(2)]

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    try:
        assert up.wait(10)
        asyncio.run(check())
    finally:
        ended.set()
        thread.join(10)


def test_waiting_for_a_server_is_not_busy(fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, and while a dead server restarts: the note says so, and the time does not count as busy."""
    engine = served(tmp_path, replicas=1)
    clock, let_start = 0.0, asyncio.Event()
    start = SglangServer.start

    async def held(server: SglangServer, timeout: float) -> None:
        await let_start.wait()
        await start(server, timeout)

    monkeypatch.setattr(SglangServer, "start", held)
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


@pytest.mark.parametrize("newer", [False, True], ids=["undisturbed", "updated"])
def test_what_a_server_has_streamed_stays_when_it_dies(
    newer: bool, fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been heard. The rest comes from the next server; an update meanwhile leaves its versions unknown."""
    engine, left = served(tmp_path, replicas=1), [3, 8]

    async def stream(
        server: SglangServer, path: str, body: dict[str, Any], take: Callable[[dict[str, Any]], bool]
    ) -> None:
        assert path == "/generate" and body["stream"]
        most, dies = body["sampling_params"]["max_new_tokens"], len(left) == 2
        for count in range(1, min(left.pop(0), most) + 1):
            span = [{"version": server.label, "start": 0, "end": count}]
            meta = {"completion_tokens": count, "output_token_logprobs": [[-0.5, most, None]]}
            ended = {"finish_reason": {"type": "length"}, "weight_versions": span}
            take({"output_ids": [most], "meta_info": meta | (ended if count == most else {"finish_reason": None})})
        if dies:
            if newer:
                await engine.load(update(engine, 1))
            raise ServerGone("has died")

    monkeypatch.setattr(SglangServer, "stream", stream)

    async def scenario() -> None:
        heard: list[list[int]] = []
        completion = await engine.generate(PROMPT, Limits(8), heard=lambda told: heard.append(told.tolist()))
        said, run = ([8] * 8, (1, 8)) if newer else ([8] * 3 + [5] * 5, (0, 8))
        assert completion.tokens.tolist() == said and completion.runs == [run]
        assert heard == [[8], [8] * 2, [8] * 3] + [said[:n] for n in range(1 if newer else 4, 8)]
        assert engine.stats()["tokens"] == 8

    asyncio.run(watched(engine, scenario))


def test_a_streamed_answer_is_read_event_by_event_and_its_end_is_not_taken_on_trust() -> None:
    """Cut anywhere on its way, with errors as events, and one that breaks off."""
    big = json.dumps({"text": "x" * 300_000}).encode()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=503 if request.path == "/unwell" else 200)
        await response.prepare(request)
        for piece in parts[request.path]:
            await response.write(piece)
            await asyncio.sleep(0.01)
        return response

    parts = {
        "/ping": [],
        "/whole": [b'data: {"a": 1}\n', b'\ndata: {"a": 2}\n\ndata: ' + big + b"\n\ndat", b"a: [DONE]\n\n"],
        "/half": [b'data: {"a": 1}\n\n', b'data: {"a"'],
        "/error": [b'data: {"error": {"code": 400, "message": "too long"}}\n\ndata: [DONE]\n\n'],
        "/unwell": [b"loading"],
    }

    async def check() -> None:
        app = web.Application()
        app.router.add_post("/{path}", answer)
        app.router.add_get("/ping", answer)
        async with TestServer(app) as there:
            server, found = SglangServer("S", url=str(there.make_url(""))), list[dict[str, Any]]()
            await server.start(10)
            await server.stream("/whole", {}, found.append)
            assert found == [{"a": 1}, {"a": 2}, json.loads(big)]
            with pytest.raises(ServerGone, match="breaks off"):
                await server.stream("/half", {}, found.append)
            with pytest.raises(ServerRefused, match="S: /error: 400 too long"):
                await server.stream("/error", {}, found.append)
            with pytest.raises(ServerGone, match="is not well: loading"):
                await server.stream("/unwell", {}, found.append)
            await server.close()

    asyncio.run(check())


# ---- the rule --------------------------------------------------------------------------------------------------------


class Probes:
    """A server's answers, in the order of the questions; when none is left, it does not answer."""

    def __init__(self, *answers: bool):
        self.answers, self.asked = [*answers], 0

    async def __call__(self) -> bool:
        self.asked += 1
        if not self.answers:
            await asyncio.Event().wait()
        return self.answers.pop(0)


async def seconds(pulse: Pulse, count: int) -> str:
    for _ in range(count):
        if problem := pulse.tick(1.0):
            return problem
        for _ in range(3):
            await asyncio.sleep(0)
    return ""


def test_a_server_that_makes_tokens_is_not_asked_and_one_that_answers_is_well() -> None:
    async def check() -> None:
        probes = Probes(True, True)
        pulse = Pulse(120.0, probes)
        for _ in range(30):
            assert await seconds(pulse, 9) == ""
            pulse.beat()
        assert probes.asked == 0
        assert await seconds(pulse, 25) == "" and probes.asked == 2, "idle: asked every 10 s"

    asyncio.run(check())


def test_a_forward_pass_that_takes_long_is_no_failure_and_one_without_end_is() -> None:
    async def check() -> None:
        probes = Probes()
        pulse = Pulse(120.0, probes)
        for _ in range(3):
            assert await seconds(pulse, 119) == "", "slow, and alive"
            pulse.beat()
        assert await seconds(pulse, 119) == "" and probes.asked == 1, "one probe at a time"
        assert await seconds(pulse, 1) == "was frozen (no token for 120 s)"
        pulse.stop()

    asyncio.run(check())


def test_a_server_is_not_blamed_for_time_in_which_its_actor_stood_still() -> None:
    async def check() -> None:
        pulse = Pulse(120.0, Probes())
        assert pulse.tick(3600.0) == ""

    asyncio.run(check())


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine starts `sglang_stand_in` instead of SGLang; of the weights it gets only what it must confirm."""
    monkeypatch.setattr(sglang_server, "_LAUNCH", ["-m", "tests.actors.sglang_stand_in"])

    def confirmation(tensors: list[Any], ranks: int) -> list[str]:
        return [APPLIED + sglang_patch.read(tensors[0][1].numpy()).digest]

    monkeypatch.setattr(sglang_weights, "serialised", confirmation)


def processes(group: int) -> set[int]:
    """The processes of a group that are alive."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(of) == group and state not in "ZX":
            found.add(int(folder.name))
    return found


@pytest.mark.parametrize("whole", [False, True], ids=["scheduler", "server"])
def test_a_server_that_stands_still_is_exchanged_for_a_new_one(
    stand_in: None, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow server is left alone. Then its scheduler stops in mid-sequence, or the whole server stops while idle."""
    monkeypatch.setenv("STAND_IN_STEP", "0.25")
    engine = served(tmp_path, replicas=1, frozen_after=2.0)

    async def scenario() -> None:
        (server,) = engine._servers
        await engine.load(update(engine, 1))
        asked = asyncio.create_task(engine.generate(PROMPT, Limits(10)))
        if whole:
            assert (await asked).runs == [(1, 10)], "longer than 2 s in all"
        await until(lambda: whole or server.load == 1)
        first, scheduler = server.pid or 0, (await server.get("/server_info"))["scheduler"]
        assert engine.stats()["restarts"] == 0 and len(processes(first)) == 3, "server, scheduler, guard"
        os.kill(first if whole else scheduler, signal.SIGSTOP)
        await until(lambda: not server.ready.is_set())
        assert engine.condition == ("restarting", "its SGLang server was frozen (no token for 2 s), restarting")
        assert (await asked).runs == [(1, 10)], "sampled anew, by weights whose digest the new server has confirmed"
        await until(server.ready.is_set)
        assert engine.stats()["restarts"] == 1 and server.digest == engine.digest
        assert not processes(first)

    asyncio.run(watched(engine, scenario))


def test_an_update_that_hangs_blocks_nobody_for_ever(
    stand_in: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_weights, "SLOWEST_BYTES_PER_SECOND", float("inf"))
    monkeypatch.setenv("STAND_IN_HANG", "/end_weight_update")
    engine = served(tmp_path, replicas=1, frozen_after=2.0)

    async def scenario() -> None:
        (server,) = engine._servers
        await engine.load(update(engine, 1))
        assert not server.ready.is_set()
        assert (
            server.failure == "did not take new weights: SGLang 0 was frozen (no answer to /end_weight_update for 2 s)"
        )
        await asyncio.sleep(0.5)
        assert engine.condition[1].endswith(
            "did not take new weights: was frozen (no answer to /end_weight_update for 2 s), restarting"
        )

    asyncio.run(watched(engine, scenario))
