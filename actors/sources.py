"""Sources of an actor's weights: relays, if the buffer names any, and at last the learner's publisher.

A relay has all parts of the weights; the publisher is one server per part, each on a rank of the learner. The actor
asks one source at a time, the nearest first. It leaves a relay, and avoids it for some time, if the relay is silent,
has nothing new, or lacks the wanted version. For the publisher it waits, and asks again for missing data.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import numpy as np

from areal_like.weights.replica import Desync
from areal_like.wire import messages
from areal_like.wire.bus import AsyncDealer
from areal_like.wire.frames import Received, WireError
from areal_like.wire.link import BusError
from areal_like.wire.messages import Manifest

log = logging.getLogger(__name__)
CHUNK_BYTES = 1 << 20
CHUNKS_IN_FLIGHT = 8
RETRY_SECONDS, RELAY_SECONDS = 5.0, 3.0
"""Seconds of silence after which missing chunks are asked for again from the publisher, and a relay is left."""
LOOK_SECONDS = 0.25
"""Seconds between checks for news while waiting for a plan."""
PATIENCE_SECONDS = 10.0
"""Seconds of "later" while nothing arrives at a relay, until it is left: rearranged relays may wait in a circle."""
AVOID_SECONDS = 60.0
"""Seconds for which a relay that was left is not asked again."""

Row = tuple[int, int, int, str]
"""(base, version, bytes, checksum) of a hop (`areal_like.weights.history`)."""


class Superseded(Exception):
    """The requested version is gone; there is a newer one."""


class Unreachable(Exception):
    """A relay does not deliver; the text is the reason."""


class Sources:
    """`connect(endpoint, peer=, key=)` opens a dealer. Counts bytes `received` and `relayed`, and relays `left`."""

    def __init__(self, name: str, connect: Callable[..., AsyncDealer]):
        self._name, self._connect = name, connect
        self._dealers: list[AsyncDealer] = []
        self._pending: dict[AsyncDealer, asyncio.Task[Received]] = {}
        self._endpoints: list[str] = []
        self._relays: list[tuple[str, str]] = []
        self._publisher: list[str] = []
        self._avoided: dict[str, float] = {}
        self.received = self.relayed = self.left = 0

    def set(self, manifest: Manifest) -> None:
        """Use the sources that an announcement names, from now on."""
        self._relays, self._publisher = manifest.relays, manifest.parts
        self._choose()

    def leave(self, reason: object) -> bool:
        """Turn to the next source. False: there is none."""
        if not self._is_relay():
            return False
        (relay,) = self._endpoints
        log.warning("%s: weights are fetched elsewhere than from the relay %s: %s", self._name, relay, reason)
        self.left += 1
        self._avoided[relay] = time.monotonic()
        self._choose()
        return True

    def _choose(self) -> None:
        now = time.monotonic()
        self._avoided = {each: since for each, since in self._avoided.items() if now - since < AVOID_SECONDS}
        offers = [offer for offer in self._relays if offer[0] not in self._avoided]
        endpoints, key, peer = self._publisher, "", "learner's publisher"
        if offers:
            endpoints, key, peer = [offers[0][0]], offers[0][1], "relay"
        if endpoints != self._endpoints:
            self.close()
            self._dealers = [self._connect(endpoint, self._name, peer, key=key) for endpoint in endpoints]
            self._endpoints = endpoints

    async def plan(
        self, part: int, version: int, held: int, digest: str, other_relays: Callable[[], bool]
    ) -> list[Row]:
        """Hops from the held version of a part to `version`, or to the newest that the source has. Raises Superseded if
        there is no route, or if `other_relays` can be asked meanwhile; Unreachable; Desync."""
        dealer = self._dealer(part)
        request = messages.Sync(part, version, held, digest)
        dealer.send(request)
        heard = moved = time.monotonic()
        progress = -1
        while True:
            received = await self._within(dealer, LOOK_SECONDS)
            now = time.monotonic()
            match received and received.message:
                case None:
                    if self._silent(dealer, now - heard):
                        dealer.send(request)
                        heard = now
                case messages.Hops(part=of, version=to, hops=hops) if (of, to) == (part, version):  # else left over
                    if not hops:
                        raise Superseded
                    return hops
                case messages.Later(part=of, version=to, progress=so_far) if (of, to) == (part, version):
                    heard = now
                    if so_far != progress:
                        moved, progress = now, so_far
            if other_relays():
                raise Superseded
            if self._is_relay() and now - moved > PATIENCE_SECONDS:
                raise Unreachable(f"it has waited {PATIENCE_SECONDS:.0f} s for version {version} itself")

    async def fetch(self, part: int, row: Row, put: Callable[[int, np.ndarray], None]) -> None:
        """Hand a hop chunk by chunk to `put(offset, uint8)`, in any order. Raises Superseded, Unreachable, Desync."""
        base, version, nbytes, _ = row
        dealer, offsets = self._dealer(part), iter(range(0, nbytes, CHUNK_BYTES))
        waiting: set[int] = set()

        def ask(offset: int | None) -> None:
            if offset is not None:
                waiting.add(offset)
                dealer.send(messages.Fetch(part, base, version, offset, CHUNK_BYTES))

        for _ in range(CHUNKS_IN_FLIGHT):
            ask(next(offsets, None))
        while waiting:
            received = await self._within(dealer, RELAY_SECONDS if self._is_relay() else RETRY_SECONDS)
            if received is None:
                self._silent(dealer, RETRY_SECONDS)
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
            self.relayed += expected if self._is_relay() else 0
            waiting.discard(offset)
            ask(next(offsets, None))

    def _is_relay(self) -> bool:
        return self._endpoints != self._publisher

    def _dealer(self, part: int) -> AsyncDealer:
        return self._dealers[0 if self._is_relay() else part]

    def _silent(self, dealer: AsyncDealer, seconds: float) -> bool:
        """Nothing has come for so long: is the publisher to be asked again? Raises Unreachable if it is a relay's turn
        to be left, BusError if the publisher does not let this actor in."""
        try:
            dealer.link.check()
        except BusError as error:
            if self._is_relay():
                raise Unreachable(error) from None
            raise
        if self._is_relay() and seconds >= RELAY_SECONDS:
            raise Unreachable(f"it has sent nothing for {seconds:.0f} s")
        if seconds < RETRY_SECONDS:
            return False
        log.warning("%s: the publisher has sent nothing for %.0f s", self._name, seconds)
        return True

    async def _within(self, dealer: AsyncDealer, seconds: float) -> Received | None:
        """The next message, or None after `seconds`. Raises Unreachable for a bad one of a relay, else WireError."""
        # One receive per dealer, never cancelled while the dealer is open: cancelling it may lose a message.
        pending = self._pending.get(dealer) or asyncio.ensure_future(dealer.receive())
        self._pending[dealer] = pending
        if not (await asyncio.wait([pending], timeout=seconds))[0]:
            return None
        del self._pending[dealer]
        try:
            return pending.result()
        except WireError as error:
            if self._is_relay():
                raise Unreachable(error) from None
            raise

    def close(self) -> None:
        for pending in self._pending.values():
            pending.cancel()
        self._pending.clear()
        for dealer in self._dealers:
            dealer.close()
        self._dealers, self._endpoints = [], []
