"""The SGLang servers of one engine: started, watched, and started again when they die."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from actors.engines.sglang_server import ServerGone, ServerRefused, SglangServer

log = logging.getLogger(__name__)
NOTE_CHARACTERS = 200
Equip = Callable[[SglangServer], Awaitable[None]]
"""Gives weights to a server that has just been started, and lets it be used."""


class SglangFleet:
    """A server with each of `commands` as its arguments; their logs are in `folder`. See `SglangEngine` for the
    knobs."""

    def __init__(
        self,
        folder: Path,
        commands: Sequence[list[str]],
        environment: dict[str, str],
        *,
        tp_size: int,
        patience: float,
        start_timeout: float,
        max_restarts: int,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.servers = [
            SglangServer(f"SGLang {i}", arguments, environment, folder / f"server-{i}.log", tp_size, patience)
            for i, arguments in enumerate(commands)
        ]
        self.restarts = 0
        self._start_timeout, self._max_restarts = start_timeout, max_restarts
        self._failures, self._proven = Counter[SglangServer](), set[SglangServer]()
        self._notes: dict[SglangServer, str] = {}

    @property
    def condition(self) -> tuple[str, str]:
        """See `SglangEngine.condition`."""
        out = [server for server in self.servers if not server.ready.is_set()]
        only = len(self.servers) == 1
        titles = {each: "SGLang server" if only else each.name.replace("SGLang", "SGLang server") for each in out}
        notes = "; ".join(f"its {titles[each]} {self._notes.get(each, 'is starting')}" for each in out)
        if len(out) < len(self.servers):
            return "serving", notes[:NOTE_CHARACTERS]
        return "restarting" if self._proven else "starting", notes[:NOTE_CHARACTERS]

    async def watch(self, equip: Equip) -> None:
        """Keep the servers running until cancelled. Raises RuntimeError for a server that can't be kept, or UserError
        where it could never be used."""
        keepers = [asyncio.ensure_future(self._keep(server, equip)) for server in self.servers]
        try:
            await asyncio.gather(*keepers)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    async def _keep(self, server: SglangServer, equip: Equip) -> None:
        while True:
            problem = await self._bring_up(server, equip)
            if not problem:
                self._proven.add(server)
                self._notes.pop(server, None)
                problem = await server.until_dead()
            server.ready.clear()
            self._failures[server] += 1
            short = " ".join(problem.replace(f"{server.name} ", "").partition("; its log is")[0].split())
            self._notes[server] = f"{short[:NOTE_CHARACTERS]}, restarting"
            log.error("%s %s", server.name, problem)
            if server not in self._proven or self._failures[server] > self._max_restarts:
                raise RuntimeError(f"{server.name} {problem} ({self._failures[server]} times){server.last_words()}")
            self.restarts += 1

    async def _bring_up(self, server: SglangServer, equip: Equip) -> str:
        """Start a server and give it its weights; returns what went wrong, if anything did."""
        try:
            await server.start(self._start_timeout)
            await equip(server)
        except (ServerGone, ServerRefused) as error:
            return str(error)
        log.info("%s is ready at %s", server.name, server.url)
        return ""
