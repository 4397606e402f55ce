"""The way from the held weights to a version: a route of hops per part of the weights, and their bytes."""

import asyncio
from collections.abc import Callable
from functools import partial

import numpy as np
import xxhash

from actors.relay import Relay
from actors.sources import Row, Sources, Superseded
from areal_like.weights.delta import largest
from areal_like.weights.history import HEADS
from areal_like.weights.replica import NOTHING, Desync, Replica, Route
from areal_like.wire.messages import Manifest


class Fetcher:
    def __init__(self, sources: Sources, replica: Replica):
        self._sources, self._replica = sources, replica

    async def plans(self, manifest: Manifest, newest: Callable[[], Manifest | None]) -> list[list[Row]]:
        """Hops of each part to one version. `newest`: the newest manifest. Raises Desync, Superseded, Unreachable."""

        def other_relays() -> bool:
            latest = newest()
            return latest is not None and latest.relays != manifest.relays

        async def plan(part: int, version: int) -> list[Row]:
            return await self._sources.plan(part, version, *self._replica.held(part), other_relays)

        plans = [await plan(part, manifest.version) for part in range(len(manifest.parts))]
        furthest = max(hops[-1][1] for hops in plans)
        for part, hops in enumerate(plans):
            if hops[-1][1] != furthest:  # a source led us further with another part
                plans[part] = await plan(part, furthest)
        if len({hops[-1][1] for hops in plans}) > 1:
            raise Superseded
        return plans

    async def fetch(self, part: int, hops: list[Row], relay: Relay | None) -> Route:
        """Fetch the hops of a part, a base snapshot into its place. Raises Desync, Superseded, Unreachable."""
        replica, base_snapshot, messages = self._replica, None, list[memoryview]()
        layout = replica.layouts[part]
        put = lambda offset, chunk: layout.copy_in(chunk, offset, replica.state)  # noqa: E731
        for hop in hops:
            base, version, nbytes, checksum = hop
            if base == NOTHING:
                base_snapshot = version
                if relay:
                    await asyncio.to_thread(relay.begin, replica)
                replica.forget(part)
                if nbytes != layout.nbytes:
                    raise Desync("wrong size", f"{nbytes} bytes are announced")
                await self._sources.fetch(part, hop, put)
                continue
            if not 0 <= nbytes <= largest(layout) + HEADS - sum(each.nbytes for each in messages):
                raise Desync("wrong size", f"{nbytes} bytes are announced")
            message = np.empty(nbytes, np.uint8)
            await self._sources.fetch(part, hop, partial(_put, message))
            if xxhash.xxh3_64_hexdigest(message.data) != checksum:
                raise Desync("wrong checksum", f"of the delta from version {base}")
            messages.append(message.data)
        return Route(base_snapshot, messages)


def _put(message: np.ndarray, offset: int, chunk: np.ndarray) -> None:
    message[offset : offset + chunk.size] = chunk
