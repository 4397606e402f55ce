"""Fakes of the processes behind SGLang `SglangServer`s: a test decides the order of events."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.engines import sglang_flags, sglang_weights
from actors.engines.sglang_engine import SglangEngine
from actors.engines.sglang_server import ServerGone, SglangServer
from areal_like.models.causal_lm import publishable, qwen2, state_of
from areal_like.weights.update import Update

SECONDS = 30
PROMPT = np.array([1, 2, 3], np.int32)


def tiny() -> Any:
    model = qwen2(0, 20)
    publishable(model)
    return model


class Fakes:
    """Stands in for the processes behind `SglangServer`s and records what they are sent. A request runs until it is
    aborted and then returns two tokens; with `quick` it ends by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.events: list[tuple[str, str, str]] = []
        self.tp: dict[str, int] = {}
        self.preempted: dict[str, int] = {}
        self.quick = False
        self._waiting: dict[str, list[asyncio.Future]] = {}
        self._dead: dict[str, asyncio.Future] = {}
        for name in ("start", "kill", "get", "text", "post", "until_dead"):
            monkeypatch.setattr(SglangServer, name, self._bound(getattr(self, name)))

        async def holds(server: SglangServer, held: Any) -> bool:
            return False

        async def give(server: SglangServer, weights: Any, mode: str, flush: bool) -> sglang_weights.LoadOutcome:
            self.events.append((server.name, "give", weights.label))
            server.digest, server.label = weights.held.digest, weights.label
            return sglang_weights.LoadOutcome(True, True, True, 0, 0.0)

        monkeypatch.setattr(sglang_weights, "holds", holds)
        monkeypatch.setattr(sglang_weights, "give", give)

    @staticmethod
    def _bound(method: Callable) -> Callable:
        return lambda server, *args: method(server, *args)

    async def start(self, server: SglangServer, timeout: float) -> None:
        await asyncio.sleep(0)
        told = " ".join(server.arguments or ["--tp-size 1"])
        self.tp[server.name] = int(told.split("--tp-size ")[1].split()[0])
        if server.arguments or server.name not in self.preempted:
            self.preempted[server.name] = 0
        server.digest = ""
        self.events.append((server.name, "start", told))
        self._waiting[server.name], self._dead[server.name] = [], asyncio.get_running_loop().create_future()

    def kill(self, server: SglangServer) -> None:
        server.ready.clear()
        if server.name in self.tp:
            self.events.append((server.name, "kill", ""))
            del self.tp[server.name]
            for each in self._waiting[server.name]:
                if not each.done():
                    each.set_exception(ServerGone("killed"))

    def die(self, server: SglangServer) -> None:
        self._dead[server.name].set_result("has died")

    async def until_dead(self, server: SglangServer) -> str:
        return await self._dead[server.name]

    async def get(self, server: SglangServer, path: str) -> dict[str, Any]:
        return {"custom_weight_loader": [sglang_flags.LOAD_FORMAT], "tp_size": self.tp[server.name]}

    async def text(self, server: SglangServer, path: str) -> str:
        assert path == "/metrics"
        return f'sglang:num_retracted_requests_total{{tp_rank="0"}} {self.preempted[server.name]}.0\n'

    async def post(self, server: SglangServer, path: str, body: dict[str, Any], extra: float = 0.0) -> dict[str, Any]:
        if path == "/abort_request":
            assert body == {"abort_all": True}
            self.events.append((server.name, "abort", ""))
            for each in self._waiting[server.name]:
                if not each.done():
                    each.set_result([5, 6])
            return {}
        assert path == "/generate"
        self.events.append((server.name, "ask", server.label))
        count, label = body["sampling_params"]["max_new_tokens"], server.label
        tokens = [7] * count if self.quick else await self._aborted(server)
        self.events.append((server.name, "answer", ""))
        return {
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": {"type": "abort"},
                "output_token_logprobs": [[-0.5, token, None] for token in tokens],
                "weight_versions": [{"version": label, "start": 0, "end": len(tokens)}],
            },
        }

    async def _aborted(self, server: SglangServer) -> list[int]:
        asked = asyncio.get_running_loop().create_future()
        self._waiting[server.name].append(asked)
        return await asked

    def order(self, *kinds: str) -> list[tuple[str, str]]:
        return [(name[-1], kind) for name, kind, _ in self.events if kind in kinds]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        turns = 0
        while not true():
            await asyncio.sleep(0 if turns < 1000 else 0.01)  # real processes take time
            turns += 1


async def watched(engine: SglangEngine, scenario: Callable[[], Awaitable[None]]) -> None:
    watch = asyncio.create_task(engine.watch())
    try:
        await until(lambda: all(server.ready.is_set() for server in engine._servers) or watch.done())
        told = asyncio.ensure_future(scenario())
        await asyncio.wait([watch, told], timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
        assert watch.done() or told.done()
        await (watch if watch.done() else told)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await engine.close()


def update(engine: SglangEngine, version: int) -> Update:
    state = state_of(tiny())
    return Update(version, state.digest(), state)


def served(folder: Path, **knobs: Any) -> SglangEngine:
    return SglangEngine(tiny(), folder, **{"replicas": 2, "slots": 4, "device": "cuda", **knobs})
