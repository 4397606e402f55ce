"""A TCP proxy that can be cut: the faults of a network between processes, on one machine. And a launcher that uses it.

It runs in a thread of the test. A link's owner is the process that has its other end. Kinds of cuts (`Proxy.cut`);
`heal` ends them:

  stall    nothing passes in either direction, no connection breaks; afterwards all goes on where it was (a lost route)
  close    connections are reset, new ones too; messages on their way are lost
  swallow  one side is reset, the other's connection looks alive and leads nowhere, also after the cut (a firewall that
           has forgotten it)
"""

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Callable

import psutil

from areal_like.launch.children import RestartLimits
from areal_like.launch.forks import Forked
from areal_like.launch.group import ProcessGroup
from areal_like.launch.local import LocalLauncher
from areal_like.launch.plan import RoleSpec
from areal_like.run.run_folder import RENDEZVOUS

_TITLE = re.compile(r"(actor-\d+|learner) areal_like ")
"""Of a role's process."""


def role_at(port: int) -> str:
    """The role whose process has this local TCP port; empty if it is no role's."""
    for each in psutil.net_connections("tcp4"):
        if each.laddr.port == port and each.pid:
            with contextlib.suppress(psutil.Error):
                title = _TITLE.match(" ".join(psutil.Process(each.pid).cmdline()))
                return title[1] if title else ""
    return ""


class Link:
    """One connection: `client` connected to the proxy, `server` is the proxy's own connection to the buffer."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter | None):
        self.client, self.server = client, server
        self.port = client.get_extra_info("peername")[1]
        self.name = ""
        self.swallows = server is None
        self.passable = asyncio.Event()
        self.passable.set()

    def reset(self, *writers: asyncio.StreamWriter | None) -> None:
        for writer in writers:
            if writer:
                writer.transport.abort()


class Proxy:
    """Listens on `port` of 127.0.0.1 and forwards to `to_port`. Methods may be called from any thread."""

    def __init__(self, to_port: int):
        self.to_port, self.port = to_port, 0
        self._links: set[Link] = set()
        self._cut = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._listen)

    def links(self, who: str) -> int:
        """The number of open links of peers whose name begins with `who`."""
        for link in list(self._links):
            link.name = link.name or role_at(link.port)  # a process may have had no title yet when it connected
        return sum(link.name.startswith(who) and not link.swallows for link in list(self._links))

    def cut(self, kind: str, who: str = "") -> None:
        """Cut the links of peers whose name begins with `who`, and all new ones, until `heal`."""
        self._call(self._do_cut, kind, who)

    def heal(self) -> None:
        self._call(self._do_heal)

    def close(self) -> None:
        self._call(self._do_cut, "close", "")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    # ---- in the thread ----------------------------------------------------------------------------------------------

    def _call(self, work: Callable, *args: str):
        async def job():
            result = work(*args)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(job(), self._loop).result(10)

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    def _do_cut(self, kind: str, who: str) -> None:
        self._cut = kind
        for link in self._links:
            if not link.name.startswith(who):
                continue
            if kind == "stall":
                link.passable.clear()
            elif kind == "swallow":
                link.swallows = True
                link.reset(link.server)
            else:
                link.reset(link.client, link.server)

    def _do_heal(self) -> None:
        self._cut = ""
        for link in self._links:
            link.passable.set()

    async def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        if self._cut == "close":
            client.transport.abort()
            return
        answers, server = None, None
        if self._cut != "swallow":
            try:
                answers, server = await asyncio.open_connection("127.0.0.1", self.to_port)
            except OSError:
                client.transport.abort()
                return
        link = Link(client, server)
        link.name = role_at(link.port)
        if self._cut == "stall":
            link.passable.clear()
        self._links.add(link)
        jobs = [self._pump(link, reader, server)] + ([self._pump(link, answers, client)] if answers else [])
        try:
            await asyncio.gather(*jobs)
        finally:
            link.reset(client, server)
            self._links.discard(link)

    async def _pump(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter | None) -> None:
        try:
            while data := await reader.read(1 << 16):
                await link.passable.wait()
                if writer and not link.swallows:
                    writer.write(data)
                    await writer.drain()
        except OSError:
            pass
        if not link.swallows:
            link.reset(link.client, link.server)


class ProxiedLauncher(LocalLauncher):
    """Its processes find the buffer at the endpoint `proxy`. The plan starts the buffer first."""

    def __init__(self, run, limits: RestartLimits, *, proxy: str):
        super().__init__(run, limits)
        self.proxy = proxy

    def spawn(self, role: RoleSpec, name: str) -> ProcessGroup | Forked:
        if role.name != "buffer":
            self._put_proxy_between()
        return super().spawn(role, name)

    def _put_proxy_between(self) -> None:
        offer = self.running.run / RENDEZVOUS / "buffer.json"
        deadline = time.monotonic() + 60
        while not offer.exists():
            assert time.monotonic() < deadline, "the buffer did not come up"
            time.sleep(0.01)
        beside = offer.with_suffix(".proxied")
        beside.write_text(json.dumps(json.loads(offer.read_text()) | {"endpoint": self.proxy}))
        beside.replace(offer)
