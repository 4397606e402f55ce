"""The SGLang servers of one engine: started, watched, started again when they die; and, if wanted, exchanged for others
over the same devices, each spread over twice as many of them or half as many (tensor parallelism, TP).

    plan()  once per weight update, before it: TP stays, or
            servers take no more requests → what is under way is broken off, its tokens come back → `watch` is told
    watch() keepers of the old servers end, and all servers → those of the new TP are started, get weights, get requests

`Server` objects stay: with a larger TP the last of them have no process. A change is no failure; it does not count
towards `max_restarts`. Nothing is sampled between `plan` and the new servers, so their labels are the newer weights'.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from actors.engines import sglang_flags
from actors.engines.parallelism import Parallelism
from actors.engines.sglang_server import Server, ServerGone, ServerRefused

log = logging.getLogger(__name__)
_BREAK_OFF_SECONDS = 30.0
"""Seconds after which a server is ended all the same: its open requests are sampled again."""
_ABORT_SECONDS = 0.1
NOTE_CHARACTERS = 200
_COUNT_SECONDS = 10.0
_RETRACTED = "sglang:num_retracted_requests_total"
"""A server's counter of requests put back for want of memory. (`num_retractions` of an answer counts those put back for
a weight update, too, and nothing tells which is which.)"""


class Fleet:
    """`layouts`: TP → arguments of each of its servers (None: it is not ours). With several, TP is planned
    (`parallelism.py`), from the least on. `counters`: a folder per server of ours for what it counts. `preemptions`: of
    all servers, as far as they were counted."""

    def __init__(
        self,
        servers: Sequence[Server],
        layouts: dict[int, list[list[str] | None]],
        *,
        start_timeout: float,
        max_restarts: int,
        counters: Sequence[Path] = (),
    ):
        self.servers = servers
        self.restarts = self.replans = self.preemptions = 0
        self._layouts, self._planned = layouts, min(layouts)
        self._planner = Parallelism(min(layouts), max(layouts)) if len(layouts) > 1 else None
        self._start_timeout, self._max_restarts = start_timeout, max_restarts
        self._counters, self._counted = dict(zip(servers, counters, strict=False)), Counter[Server]()
        self._before_plan = 0
        self._failures, self._proven = Counter[Server](), set[Server]()
        self._changed = asyncio.Event()
        self._notes: dict[Server, str] = {}
        self._arrange()

    @classmethod
    def started_in(
        cls,
        folder: Path,
        replicas: int,
        layouts: dict[int, list[list[str] | None]],
        environment: dict[str, str],
        *,
        patience: float,
        **timing: Any,
    ) -> Fleet:
        """Servers of ours, with logs and counters in `folder`."""
        counters = [folder.resolve() / f"counters-{i}" for i in range(replicas)]
        servers = []
        for i in range(replicas):
            own = environment | {"PROMETHEUS_MULTIPROC_DIR": str(counters[i])}
            log = folder / f"server-{i}.log"
            servers.append(Server(f"SGLang {i}", arguments=[], environment=own, log=log, patience=patience))
        return cls(servers, layouts, counters=counters, **timing)

    @property
    def tp_size(self) -> int:
        return self.servers[0].ranks

    @property
    def condition(self) -> tuple[str, str]:
        """See `SglangEngine.condition`."""
        out = [server for server in self._used if not server.ready.is_set()]
        names = {each: each.name.replace("SGLang", "SGLang server") for each in out}
        if len(self._used) == 1:
            names = dict.fromkeys(out, "SGLang server")
        begins = {each: "is starting" if each.is_ours else f"is waited for at {each.url}" for each in out}
        notes = "; ".join(f"its {names[each]} {self._notes.get(each, begins[each])}" for each in out)
        if len(out) < len(self._used):
            return "serving", notes[:NOTE_CHARACTERS]
        return "restarting" if self._proven else "starting", notes[:NOTE_CHARACTERS]

    def _arrange(self) -> None:
        """End all servers, and choose those to start."""
        for server in self.servers:
            server.kill()
            server.open.set()
        self._used = self.servers[: len(self._layouts[self._planned])]
        for server, arguments in zip(self._used, self._layouts[self._planned], strict=True):
            server.arguments, server.ranks = arguments, self._planned
        self._changed.clear()

    # ---- keeping ----------------------------------------------------------------------------------------------------

    async def watch(self, equip: Callable[[Server], Awaitable[None]]) -> None:
        """Keep the servers running, for ever. `equip` gives weights to one, and lets it be used. Waits for a change of
        plan, or a server that can't be kept: raises RuntimeError, or UserError where it could never be used."""
        while True:
            keepers = [asyncio.ensure_future(self._keep(server, equip)) for server in self._used]
            tasks = [*keepers, asyncio.ensure_future(self._changed.wait())]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for task in done:
                task.result()
            self._arrange()

    async def _keep(self, server: Server, equip: Callable[[Server], Awaitable[None]]) -> None:
        while True:
            problem = await self._bring_up(server, equip)
            if not problem:
                self._proven.add(server)
                self._notes.pop(server, None)
                problem = await server.until_dead()
            server.ready.clear()
            self._failures[server] += 1
            short = _in_short(problem.replace(f"{server.name} ", ""))
            self._notes[server] = f"{short}, {'restarting' if server.is_ours else 'waiting for it'}"
            log.error("%s %s", server.name, problem)
            if server not in self._proven or self._failures[server] > self._max_restarts:
                raise RuntimeError(f"{server.name} {problem} ({self._failures[server]} times){server.last_words()}")
            self.restarts += 1

    async def _bring_up(self, server: Server, equip: Callable[[Server], Awaitable[None]]) -> str:
        """Start a server and give it its weights; returns what went wrong, if anything did."""
        self._counted[server] = 0
        if folder := self._counters.get(server):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        try:
            await server.start(self._start_timeout)
            server.ranks = sglang_flags.checked(await server.get("/server_info"))
            if not folder:
                await self._count(server)  # what it put back before it was joined is not of this engine's doing
            await equip(server)
        except (ServerGone, ServerRefused) as error:
            return str(error)
        log.info("%s is ready at %s", server.name, server.url)
        return ""

    # ---- planning ---------------------------------------------------------------------------------------------------

    async def plan(self, requests: int) -> bool:
        """Once per weight update: `requests` were worked on since the last one. True if the servers are exchanged: then
        none of them has a request any more, or gets one, and what is started gets weights from `equip`."""
        ready = [server for server in self._used if server.ready.is_set()]
        if self._planner is None or not ready:
            return False
        await self.count()
        preemptions, self._before_plan = self.preemptions - self._before_plan, self.preemptions
        tp_size = self._planner.step(requests, preemptions)
        if tp_size == self._planned:
            return False
        log.info("TP %d → %d: %d preemptions, %d requests", self._planned, tp_size, preemptions, requests)
        self._notes = dict.fromkeys(self.servers, f"is exchanged: TP {self._planned} → {tp_size}")
        self._planned = tp_size
        self.replans += 1
        try:
            for server in self.servers:
                server.ready.clear()
            await asyncio.gather(*(self._break_off(server) for server in ready))
        finally:
            self._changed.set()
        return True

    async def count(self) -> int:
        """Preemptions of all servers since the last call."""
        ready = [server for server in self._used if server.ready.is_set()]
        found = sum(await asyncio.gather(*(self._count(server) for server in ready)))
        self.preemptions += found
        return found

    async def _count(self, server: Server) -> int:
        try:
            async with asyncio.timeout(_COUNT_SECONDS):
                total = retracted(await server.text("/metrics"))
        except (ServerGone, ServerRefused, TimeoutError):  # its keeper will see it; one that was joined may not count
            return 0
        before, self._counted[server] = self._counted[server], total
        return max(0, total - before)

    @staticmethod
    async def _break_off(server: Server) -> None:
        """Abort repeatedly: a request may still be on its way, and a pause with `abort` would hold it for ever."""
        with suppress(ServerGone, ServerRefused, TimeoutError):
            async with asyncio.timeout(_BREAK_OFF_SECONDS):
                while server.load:
                    await server.post("/abort_request", {"abort_all": True})
                    await asyncio.sleep(_ABORT_SECONDS)


def _in_short(problem: str) -> str:
    """A problem without the end of the server's log, in one line."""
    return " ".join(problem.partition("; its log is")[0].split())[:NOTE_CHARACTERS]


def retracted(metrics: str) -> int:
    """The counter in the text of `/metrics` (Prometheus); 0 before the first. TP ranks that count count the same."""
    lines = (line for line in metrics.splitlines() if line.startswith(_RETRACTED))
    return max((int(float(line.rsplit(" ", 1)[1])) for line in lines), default=0)
