"""One SGLang server, spoken to by HTTP: our own process, which is started, watched and ended, or an existing one.

A server of ours dies with this process, however that ends (`actors.child`). Nothing is retried here: the caller decides
what a failure means.

Every call has a time limit, but `/generate`: sequences may take any time, and the server's `Pulse` tells whether it
works on them.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

try:
    import aiohttp
except ModuleNotFoundError:  # the base install: `SglangServer` says what to do
    aiohttp = None  # type: ignore[assignment]

from actors.child import Child, free_port
from actors.engines.sglang_health import Pulse
from areal_like.places import REPOSITORY

_POLL_SECONDS = 0.25
_MISSES = 20
"""Polls in a row that a server which is not ours must leave unanswered to count as dead."""
_LOG_LINES = 15
_LAUNCH = ["-m", "sglang.launch_server"]
_PROBE_SECONDS = 25.0
"""Seconds for a probe: SGLang itself gives up after 20 s."""


class ServerGone(RuntimeError):
    """The server does not answer: it has died, or is about to."""


class ServerRefused(RuntimeError):
    """The server refused, or failed; the text says why."""


class SglangServer:
    """Of our own if there is `arguments`, those of `sglang.launch_server` but host and port, and a file for its `log`;
    else at `url`. `environment` is added to this process's own.

    Raises ValueError where the extra `sglang` is not installed.

    `digest` is that of the weights it is known to hold ("": unknown), `label` what it files their tokens under; `ready`
    is set while it may be given requests; `open` while it is not paused; `load` counts the requests that it works on;
    `ranks` of tensor parallelism. They, and `arguments` between two lives, are the engine's to keep. `pulse` notices
    one that stands still for `patience` seconds, which is the time limit of calls, too.
    """

    def __init__(
        self,
        name: str,
        *,
        url: str = "",
        arguments: list[str] | None = None,
        environment: dict[str, str] | None = None,
        log: Path | None = None,
        patience: float = 120.0,
    ):
        if aiohttp is None:
            raise ValueError("engine=sglang needs more: pip install -e .[sglang] -c constraints-sglang.txt")
        self.name, self.url = name, url.rstrip("/")
        self.digest, self.label, self.load, self.ranks = "", "", 0, 1
        self.ready, self.open = asyncio.Event(), asyncio.Event()
        self.open.set()
        self.arguments, self._environment, self._log = arguments, environment or {}, log
        self._process: Child | None = None
        self._session: aiohttp.ClientSession | None = None
        self.failure = ""
        self.pulse = Pulse(patience, self._makes_tokens)

    @property
    def is_ours(self) -> bool:
        return self.arguments is not None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, timeout: float) -> None:
        """Returns once the server is healthy. Raises ServerGone (with the tail of its log) if it ends before that, or
        takes more than `timeout` seconds."""
        if self._session is not None:  # requests to a server that was joined, and hangs, break off
            await self._session.close()
        # Each request has a connection of its own: SGLang closes an idle one after 5 s, and a request on it would fail.
        limits = aiohttp.ClientTimeout(total=None, sock_connect=10)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=limits, connector=connector)
        self.failure, self.digest = "", ""
        if self.arguments is not None:
            self.kill()
            self._spawn(self.arguments)
        self.open.set()
        try:
            async with asyncio.timeout(timeout):
                while not await (self._answers("/health", 10.0) if self.is_ours else self._is_there()):
                    if not self.is_alive():
                        raise ServerGone(f"{self.name} ended before it was ready{self.last_words()}")
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise ServerGone(f"{self.name} was not ready after {timeout:.0f} s{self.last_words()}") from None

    def _spawn(self, arguments: list[str]) -> None:
        assert self._log
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        address = ["--host", "127.0.0.1", "--port", str(port)]
        command = [sys.executable, *_LAUNCH, *arguments, *address]
        with self._log.open("ab") as output:
            self._process = Child(command, environment=self._environment, output=output, folder=REPOSITORY)

    def is_alive(self) -> bool:
        """Of our own process; others are not known to be dead."""
        return self._process is None or self._process.poll() is None

    async def until_dead(self) -> str:
        """Waits until the server is dead, or as good as dead; returns how that showed."""
        missed, at = 0, time.monotonic()
        try:
            while missed < _MISSES:
                await asyncio.sleep(_POLL_SECONDS)
                if self._process is not None and (code := self._process.poll()) is not None:
                    return f"ended with exit code {code}"
                if self.failure:
                    return self.failure
                if self._process is None:
                    missed = 0 if await self._is_there() else missed + 1
                now = time.monotonic()
                if self.open.is_set() and (problem := self.pulse.tick(now - at)):
                    return problem
                at = now
            return "does not answer"
        finally:
            self.pulse.stop()

    async def _is_there(self) -> bool:
        """Is somebody listening? A server that answers slowly, or badly, is; `pulse` judges what that means."""
        assert self._session
        try:
            async with self._session.get(self.url + "/ping", timeout=aiohttp.ClientTimeout(total=1)):
                return True
        except TimeoutError:
            return True
        except aiohttp.ClientError:
            return False

    async def _makes_tokens(self) -> bool:
        return await self._answers("/health_generate", _PROBE_SECONDS)

    async def _answers(self, path: str, seconds: float) -> bool:
        """Does the server say that all is well? (One that is paused is not well.)"""
        assert self._session
        try:
            async with self._session.get(self.url + path, timeout=aiohttp.ClientTimeout(total=seconds)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def get(self, path: str) -> dict[str, Any]:
        """Raises ServerGone, ServerRefused."""
        return _object(await self._ask("GET", path, None, self.pulse.patience))

    async def text(self, path: str) -> str:
        """Of an answer that is no JSON. Raises ServerGone, ServerRefused."""
        return await self._ask("GET", path, None, self.pulse.patience)

    async def post(self, path: str, body: dict[str, Any], extra: float = 0.0) -> dict[str, Any]:
        """The answer, waited for as long as the server may stand still, and `extra` seconds (infinite: no limit).
        Raises ServerGone, ServerRefused."""
        return _object(await self._ask("POST", path, body, self.pulse.patience + extra))

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None, seconds: float) -> str:
        assert self._session
        try:
            async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                async with self._session.request(method, self.url + path, json=body) as answer:
                    text = await answer.text()
        except TimeoutError:
            raise ServerGone(f"{self.name} was frozen (no answer to {path} for {seconds:.0f} s)") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._gone(path, error) from None
        if answer.status == 200:
            return text
        raise self._failure(path, answer.status, text)

    async def stream(self, path: str, body: dict[str, Any], take: Callable[[dict[str, Any]], Any]) -> None:
        """Calls `take` with each event of an answer, for as long as that takes. Raises ServerGone (also in the middle),
        ServerRefused."""
        assert self._session
        try:
            async with self._session.post(self.url + path, json=body) as answer:
                if answer.status != 200:
                    raise self._failure(path, answer.status, await answer.text())
                async for data in _events(answer.content):
                    if data == b"[DONE]":
                        return
                    event = json.loads(data)
                    if error := event.get("error"):
                        raise self._failure(path, error.get("code"), str(error.get("message")))
                    take(event)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._gone(path, error) from None
        raise self._gone(path, "the answer breaks off")

    def _gone(self, path: str, error: object) -> ServerGone:
        return ServerGone(f"{self.name} at {self.url} does not answer {path}: {error!r}")

    def _failure(self, path: str, status: object, text: str) -> Exception:
        if status == 503:
            return ServerGone(f"{self.name} is not well: {text[:2000]}")
        return ServerRefused(f"{self.name}: {path}: {status} {text[:2000]}")

    def last_words(self) -> str:
        """The end of its log, to go behind an error message."""
        if self._log is None or not self._log.exists():
            return ""
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return f"; its log is {self._log}, which ends with\n" + "\n".join(f"  {line}" for line in lines)

    def fail(self, failure: str) -> None:
        """Take the server out of service, since its weights are unknown, until `until_dead` has returned and it is
        restarted."""
        self.ready.clear()
        self.failure = failure

    def kill(self) -> None:
        """End a server of ours, with all that it has started, at once."""
        self.ready.clear()
        if self._process is not None:
            self._process.kill()
            self._process = None

    async def close(self) -> None:
        self.kill()
        if self._session is not None:
            await self._session.close()
            self._session = None


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events, which may be megabytes each."""
    buffer, seen = bytearray(), 0
    async for chunk in content.iter_any():
        buffer += chunk
        while (end := buffer.find(b"\n\n", seen)) >= 0:
            yield bytes(buffer[:end]).removeprefix(b"data:").strip()
            del buffer[: end + 2]
            seen = 0
        seen = max(0, len(buffer) - 1)


def _object(text: str) -> dict[str, Any]:
    return json.loads(text) if text.startswith("{") else {}
