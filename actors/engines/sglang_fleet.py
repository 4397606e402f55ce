"""The SGLang servers of one engine: started, watched, and started again when they die."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from actors.engines import sglang_flags
from actors.engines.sglang_server import ServerGone, ServerRefused, SglangServer

log = logging.getLogger(__name__)
NOTE_CHARACTERS = 200
_COUNT_SECONDS = 10.0
_RETRACTED = "sglang:num_retracted_requests_total"
"""A server's counter of requests put back for want of memory. (`num_retractions` of an answer counts those put back for
a weight update, too, and nothing tells which is which.)"""


class SglangFleet:
    """`counters`: a folder per server of ours for what it counts. `preemptions`: of all servers, as far as they were
    counted."""

    def __init__(
        self,
        servers: Sequence[SglangServer],
        *,
        start_timeout: float,
        max_restarts: int,
        counters: Sequence[Path] = (),
    ):
        self.servers = servers
        self.restarts = self.preemptions = 0
        self._start_timeout, self._max_restarts = start_timeout, max_restarts
        self._counters, self._counted = dict(zip(servers, counters, strict=False)), Counter[SglangServer]()
        self._failures, self._proven = Counter[SglangServer](), set[SglangServer]()
        self._notes: dict[SglangServer, str] = {}

    @classmethod
    def started_in(
        cls,
        folder: Path,
        commands: Sequence[list[str]],
        environment: dict[str, str],
        *,
        patience: float,
        **timing: Any,
    ) -> SglangFleet:
        """Servers of ours, one with each of `commands` as its arguments; their logs and counters are in `folder`."""
        counters = [folder.resolve() / f"counters-{i}" for i in range(len(commands))]
        servers = []
        for i, (arguments, counter) in enumerate(zip(commands, counters, strict=True)):
            own = environment | {"PROMETHEUS_MULTIPROC_DIR": str(counter)}
            log = folder / f"server-{i}.log"
            servers.append(
                SglangServer(f"SGLang {i}", arguments=arguments, environment=own, log=log, patience=patience)
            )
        return cls(servers, counters=counters, **timing)

    @property
    def tp_size(self) -> int:
        return self.servers[0].ranks

    @property
    def condition(self) -> tuple[str, str]:
        """See `SglangEngine.condition`."""
        out = [server for server in self.servers if not server.ready.is_set()]
        names = {each: each.name.replace("SGLang", "SGLang server") for each in out}
        if len(self.servers) == 1:
            names = dict.fromkeys(out, "SGLang server")
        begins = {each: "is starting" if each.is_ours else f"is waited for at {each.url}" for each in out}
        notes = "; ".join(f"its {names[each]} {self._notes.get(each, begins[each])}" for each in out)
        if len(out) < len(self.servers):
            return "serving", notes[:NOTE_CHARACTERS]
        return "restarting" if self._proven else "starting", notes[:NOTE_CHARACTERS]

    # ---- keeping ----------------------------------------------------------------------------------------------------

    async def watch(self, equip: Callable[[SglangServer], Awaitable[None]]) -> None:
        """Keep the servers running until cancelled. `equip` gives weights to one, and lets it be used. Raises
        RuntimeError for a server that can't be kept, or UserError where it could never be used."""
        keepers = [asyncio.ensure_future(self._keep(server, equip)) for server in self.servers]
        try:
            await asyncio.gather(*keepers)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    async def _keep(self, server: SglangServer, equip: Callable[[SglangServer], Awaitable[None]]) -> None:
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

    async def _bring_up(self, server: SglangServer, equip: Callable[[SglangServer], Awaitable[None]]) -> str:
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

    # ---- counting ---------------------------------------------------------------------------------------------------

    async def count(self) -> int:
        """Preemptions of all servers since the last call."""
        ready = [server for server in self.servers if server.ready.is_set()]
        found = sum(await asyncio.gather(*(self._count(server) for server in ready)))
        self.preemptions += found
        return found

    async def _count(self, server: SglangServer) -> int:
        try:
            async with asyncio.timeout(_COUNT_SECONDS):
                total = retracted(await server.text("/metrics"))
        except (ServerGone, ServerRefused, TimeoutError):  # its keeper will see it; one that was joined may not count
            return 0
        before, self._counted[server] = self._counted[server], total
        return max(0, total - before)


def _in_short(problem: str) -> str:
    """A problem without the end of the server's log, in one line."""
    return " ".join(problem.partition("; its log is")[0].split())[:NOTE_CHARACTERS]


def retracted(metrics: str) -> int:
    """The counter in the text of `/metrics` (Prometheus); 0 before the first. TP ranks that count count the same."""
    lines = (line for line in metrics.splitlines() if line.startswith(_RETRACTED))
    return max((int(float(line.rsplit(" ", 1)[1])) for line in lines), default=0)
