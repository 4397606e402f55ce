"""One SGLang server: a process of this actor, called over HTTP, and restarted after its end.

A server ends with this process, however that ends (`actors.child`). No call is retried here: the caller decides.

Every call has a time limit, but `/generate`: after `PROBE_SECONDS` without any token, SGLang's own probe
(`/health_generate`) asks for one, ahead of all waiting requests. A long prefill or a full server is no failure; only
`patience` seconds without a token are. That clock stops while a server is paused for new weights.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

try:
    import aiohttp
except ModuleNotFoundError:  # the base install: `SglangServer` names the remedy
    aiohttp = None  # type: ignore[assignment]

from actors.child import Child, free_port
from areal_like.places import REPOSITORY

log = logging.getLogger(__name__)
_POLL_SECONDS = 0.25
_LOG_LINES = 15
NOTE_CHARACTERS = 200
PROBE_SECONDS = 10.0
_PROBE_LIMIT = 25.0
"""Seconds for a probe: SGLang itself gives up after 20 s."""


class ServerGone(RuntimeError):
    """The server does not answer: it has died, or is about to."""


class ServerRefused(RuntimeError):
    """The server refused, or failed; the text is the reason."""


class SglangServer:
    """`arguments`: of `sglang.launch_server`, but host and port; `log`: a file; `environment`: added to this process's
    own; `ranks`: of tensor parallelism; `patience`: seconds without a token after which it counts as frozen, and the
    time limit of calls. Raises ValueError where the extra `sglang` is not installed.

    The engine sets `digest` (of its weights; "": unknown), `label` (of their tokens), `ready` (for requests), `open`
    (not paused) and `load` (requests that it works on). `proven`: it was ready once; `note`: what is wrong, in words.
    """

    def __init__(
        self, name: str, arguments: list[str], environment: dict[str, str], log: Path, ranks: int, patience: float
    ):
        if aiohttp is None:
            raise ValueError("engine=sglang needs more: pip install -e .[sglang] -c constraints-sglang.txt")
        self.name, self.arguments, self.ranks, self.patience = name, arguments, ranks, patience
        self.digest, self.label, self.load, self.url, self._fault = "", "", 0, "", ""
        self.proven, self.restarts, self.note = False, 0, "is starting"
        self.ready, self.open = asyncio.Event(), asyncio.Event()
        self._environment, self._log = environment, log
        self._process: Child | None = None
        self._session: aiohttp.ClientSession | None = None
        self._quiet = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def beat(self) -> None:
        self._quiet = 0.0

    async def keep(self, equip: Callable[[SglangServer], Awaitable[None]], timeout: float, restarts: int) -> None:
        """Start the server, have `equip` give it weights, and again whenever it ends, until cancelled. Raises
        RuntimeError where it ends too often, or before it was ready once."""
        while True:
            try:
                await self.start(timeout)
                await equip(self)
                log.info("%s is ready at %s", self.name, self.url)
                self.proven, self.note = True, ""
                problem = await self.until_dead()
            except (ServerGone, ServerRefused) as error:
                problem = str(error)
            self.ready.clear()
            short = " ".join(problem.replace(f"{self.name} ", "").partition("; its log is")[0].split())
            self.note = f"{short[:NOTE_CHARACTERS]}, restarting"
            log.error("%s %s", self.name, problem)
            if not self.proven or self.restarts >= restarts:
                raise RuntimeError(f"{self.name} {problem} ({self.restarts + 1} times){self._log_tail()}")
            self.restarts += 1

    async def start(self, timeout: float) -> None:
        """Returns once the server is healthy. Raises ServerGone if it ends, or takes more than `timeout` seconds."""
        await self.close()
        # Each request has a connection of its own: SGLang closes an idle one after 5 s, and a request on it would fail.
        limits = aiohttp.ClientTimeout(total=None, sock_connect=10)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=limits, connector=connector)
        self._fault, self.digest, self._quiet = "", "", 0.0
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        more = ["--host", "127.0.0.1", "--port", str(port)]
        command = [sys.executable, "-m", "sglang.launch_server", *self.arguments, *more]
        with self._log.open("ab") as output:
            self._process = Child(command, environment=self._environment, output=output, folder=REPOSITORY)
        self.open.set()
        end = time.monotonic() + timeout
        while not await self._answers("/health", 10.0):
            if self._process.poll() is not None:
                raise ServerGone(f"{self.name} ended before it was ready{self._log_tail()}")
            if time.monotonic() > end:
                raise ServerGone(f"{self.name} was not ready after {timeout:.0f} s{self._log_tail()}")
            await asyncio.sleep(_POLL_SECONDS)

    async def until_dead(self) -> str:
        """Waits until the server is dead, or as good as dead; returns how that showed."""
        assert self._process
        at, probe_after = time.monotonic(), min(PROBE_SECONDS, self.patience / 4)
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            if (code := self._process.poll()) is not None:
                return f"ended with exit code {code}"
            if self._fault:
                return self._fault
            if self.open.is_set():
                if self._quiet >= probe_after and await self._answers("/health_generate", _PROBE_LIMIT):
                    self.beat()
                # Bounded: if this process itself was stopped, its servers are not at fault.
                self._quiet += min(time.monotonic() - at, _PROBE_LIMIT)
                if self._quiet >= self.patience:
                    return f"was frozen (no token for {self.patience:.0f} s)"
            at = time.monotonic()

    async def _answers(self, path: str, seconds: float) -> bool:
        """Whether the server is healthy. (One that is paused is not.)"""
        assert self._session
        try:
            async with self._session.get(self.url + path, timeout=aiohttp.ClientTimeout(total=seconds)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def post(self, path: str, body: dict[str, Any], extra: float = 0.0) -> dict[str, Any]:
        """The answer within `patience` and `extra` seconds (infinite: no limit). Raises ServerGone, ServerRefused."""
        assert self._session
        seconds = self.patience + extra
        try:
            async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                async with self._session.post(self.url + path, json=body) as answer:
                    text = await answer.text()
        except TimeoutError:
            raise ServerGone(f"{self.name} was frozen (no answer to {path} for {seconds:.0f} s)") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ServerGone(f"{self.name} at {self.url} does not answer {path}: {error!r}") from None
        if answer.status == 503:
            raise ServerGone(f"{self.name} is not well: {text[:2000]}")
        if answer.status != 200:
            raise ServerRefused(f"{self.name}: {path}: {answer.status} {text[:2000]}")
        return json.loads(text) if text.startswith("{") else {}

    def _log_tail(self) -> str:
        if not self._log.exists():
            return ""
        lines = self._log.read_text(errors="replace", encoding="utf-8").splitlines()[-_LOG_LINES:]
        return f"; its log is {self._log}, which ends with\n" + "\n".join(f"  {line}" for line in lines)

    def fail(self, fault: str) -> None:
        """Take the server out of service, since its weights are unknown, until it is restarted."""
        self.ready.clear()
        self._fault = fault

    async def close(self) -> None:
        self.ready.clear()
        if self._process is not None:
            self._process.kill()
            self._process = None
        if self._session is not None:
            await self._session.close()
            self._session = None
