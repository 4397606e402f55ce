"""Sources of an actor's weights: the learner's publisher, one server per part of the weights, each on a rank of the
learner. The actor waits for them, and asks again for data that do not come."""

import asyncio
import logging
from collections.abc import Callable

import numpy as np

from areal_like.weights.replica import Desync
from areal_like.wire import messages
from areal_like.wire.bus import AsyncDealer
from areal_like.wire.frames import Received
from areal_like.wire.messages import Manifest

log = logging.getLogger(__name__)
CHUNK_BYTES = 1 << 20
CHUNKS_IN_FLIGHT = 8
RETRY_SECONDS = 5.0
"""Seconds of silence after which the publisher is asked again."""

Row = tuple[int, int, int, str]
"""(base, version, bytes, checksum) of a hop (`areal_like.weights.history`)."""


class Superseded(Exception):
    """The requested version is gone; there is a newer one."""


class Sources:
    """`connect(endpoint, name, peer)` opens a dealer. Counts bytes `received`."""

    def __init__(self, name: str, connect: Callable[..., AsyncDealer]):
        self._name, self._connect = name, connect
        self._dealers: list[AsyncDealer] = []
        self._pending: dict[AsyncDealer, asyncio.Task[Received]] = {}
        self._endpoints: list[str] = []
        self.received = 0

    def set(self, manifest: Manifest) -> None:
        """Use the publisher that an announcement names, from now on."""
        if manifest.parts != self._endpoints:
            self.close()
            self._dealers = [self._connect(part, self._name, "learner's publisher") for part in manifest.parts]
            self._endpoints = manifest.parts

    async def plan(self, part: int, version: int, held: int, digest: str) -> list[Row]:
        """Hops from the held version of a part to `version`, or to the newest that the publisher has. Raises Superseded
        if there is no route, BusError if the publisher does not let this actor in."""
        dealer, request = self._dealers[part], messages.Sync(part, version, held, digest)
        dealer.send(request)
        while True:
            received = await self._received(dealer)
            match received and received.message:
                case None:
                    dealer.send(request)
                case messages.Hops(part=of, version=to, hops=hops) if (of, to) == (part, version):  # else left over
                    if not hops:
                        raise Superseded
                    return hops

    async def fetch(self, part: int, row: Row, put: Callable[[int, np.ndarray], None]) -> None:
        """Hand a hop chunk by chunk to `put(offset, uint8)`, in any order. Raises Superseded, Desync, BusError."""
        base, version, nbytes, _ = row
        dealer, offsets = self._dealers[part], iter(range(0, nbytes, CHUNK_BYTES))
        waiting: set[int] = set()

        def ask(offset: int | None) -> None:
            if offset is not None:
                waiting.add(offset)
                dealer.send(messages.Fetch(part, base, version, offset, CHUNK_BYTES))

        for _ in range(CHUNKS_IN_FLIGHT):
            ask(next(offsets, None))
        while waiting:
            received = await self._received(dealer)
            if received is None:
                for offset in sorted(waiting):
                    ask(offset)
                continue
            message = received.message
            if message == messages.Gone(part, version):
                raise Superseded
            offset = message.offset if isinstance(message, messages.Chunk) else -1
            if message != messages.Chunk(part, base, version, offset) or offset not in waiting:
                continue  # left over from a fetch that was given up
            chunk, expected = received.payload, min(CHUNK_BYTES, nbytes - offset)
            if chunk.nbytes != expected:
                raise Desync("wrong size", f"a chunk of {chunk.nbytes} bytes where {expected} were asked for")
            put(offset, np.frombuffer(chunk, np.uint8))
            self.received += expected
            waiting.discard(offset)
            ask(next(offsets, None))

    async def _received(self, dealer: AsyncDealer) -> Received | None:
        """The next message; None after `RETRY_SECONDS`: the publisher is to be asked again. Raises WireError, and
        BusError if the publisher does not let this actor in."""
        # One receive per dealer, never cancelled while the dealer is open: cancelling it may lose a message.
        pending = self._pending.get(dealer) or asyncio.ensure_future(dealer.receive())
        self._pending[dealer] = pending
        if (await asyncio.wait([pending], timeout=RETRY_SECONDS))[0]:
            del self._pending[dealer]
            return pending.result()
        dealer.link.check()
        log.warning("%s: the publisher has sent nothing for %.0f s", self._name, RETRY_SECONDS)
        return None

    def close(self) -> None:
        for pending in self._pending.values():
            pending.cancel()
        self._pending.clear()
        for dealer in self._dealers:
            dealer.close()
        self._dealers, self._endpoints = [], []
