"""Servers of environments: programs that an actor starts at the first episode that needs them, or existing ones.

A server of ours ends with the actor, however that ends (`actors.child`); one that has died is started again for the
next episode. An actor starts one per command, for all of its episodes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TypeGuard
from weakref import WeakKeyDictionary

from actors.child import Child, free_port
from areal_like.errors import EpisodeError

POLL_SECONDS = 0.1
ENDING_POLLS = 10
HOST = "127.0.0.1"


def is_url(server: str | Sequence[str]) -> bool:
    return isinstance(server, str) and server.startswith(("http://", "https://"))


def is_app(server: str | Sequence[str]) -> TypeGuard[str]:
    """Is it "module:app", for uvicorn?"""
    return isinstance(server, str) and not is_url(server)


def command_of(server: str | Sequence[str]) -> tuple[str, ...]:
    """The program of a server, with `{port}` for its port: a command as it stands, or uvicorn with "module:app"."""
    if isinstance(server, str):
        return (sys.executable, "-m", "uvicorn", server, "--host", HOST, "--port", "{port}", "--log-level", "warning")
    return tuple(server)


class EnvironmentServer:
    """An existing one at its URL, or a program. `places`: sessions that it may have at once."""

    def __init__(self, server: str | Sequence[str], sessions: int):
        self.places = asyncio.Semaphore(sessions)
        self._is_ours = not is_url(server)
        self._url = "" if self._is_ours else str(server).rstrip("/")
        self._command = command_of(server)
        self._starting = asyncio.Lock()
        self._child: Child | None = None

    async def url(self, seconds: float) -> str:
        """Where it is; it is started if it does not run. Raises EpisodeError where it ends instead, or does not answer
        after so many seconds."""
        async with self._starting:
            if self._is_ours and (self._child is None or self._child.poll() is not None):
                await self._start(seconds)
        return self._url

    async def _start(self, seconds: float) -> None:
        self.kill()
        port = free_port()
        self._url = f"http://{HOST}:{port}"
        command = [part.replace("{port}", str(port)) for part in self._command]
        self._child = Child(command)
        try:
            async with asyncio.timeout(seconds):
                while not await _listens(port):
                    if (code := self._child.poll()) is not None:
                        raise EpisodeError(f"{' '.join(command)} ended with exit code {code}; see this actor's log")
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            self.kill()
            raise EpisodeError(f"{' '.join(command)} did not listen on port {port} after {seconds:g} s") from None

    async def is_ending(self) -> bool:
        """Has our program ended, or is it about to?"""
        for _ in range(ENDING_POLLS):
            if self._child is None or self._child.poll() is not None:
                break
            await asyncio.sleep(POLL_SECONDS)
        return self._child is not None and self._child.poll() is not None

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    writer.close()
    return True


_RUNNING: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, ...], EnvironmentServer]] = WeakKeyDictionary()


def server_of(server: str | Sequence[str], sessions: int) -> EnvironmentServer:
    """The one of this actor. (Actors of a run in one process have event loops of their own.)"""
    known = _RUNNING.setdefault(asyncio.get_running_loop(), {})
    return known.setdefault(
        (server,) if isinstance(server, str) else tuple(server), EnvironmentServer(server, sessions)
    )


def close() -> None:
    """End this actor's servers."""
    for each in _RUNNING.pop(asyncio.get_running_loop(), {}).values():
        each.kill()
