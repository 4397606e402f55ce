"""Weights in: fetches announced versions while the engine generates, verifies them, and applies them in one go.

    announcement ─► sync (held version, digest) ─► plan ─► parts, in chunks ─► checked ─► applied to the replica ─► load

Waits for an announcement (unblocked by the buffer) and then for the plan and chunks (unblocked by the publisher). The
replica (`areal_like.weights.replica`) lies beside the live weights; only when all parts of a version are in it and the
digest is right does the engine see the update, between two decode steps, so no token is sampled from a half-updated
model. Large updates are applied to the replica in a thread, so generation goes on. Versions that were overtaken are
skipped. Whatever does not fit (a checksum, a base, a digest) is counted by reason and ends in whole weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import xxhash

from areal_like.bus import AsyncDealer, BusError
from areal_like.interfaces import RolloutEngine
from areal_like.weights.delta import largest
from areal_like.weights.replica import NOTHING, Desync, Replica
from areal_like.weights.state import BITS, State, TensorSpec, Update
from areal_like.wire import Message

log = logging.getLogger(__name__)
CHUNK_BYTES = 1 << 20
CHUNKS_IN_FLIGHT = 8
RETRY_SECONDS = 5.0
"""When nothing has come for so long, what is missing is asked for again: a connection that broke loses messages."""
TRIES = 3
"""Wrong weights in a row, whole ones at last: then something is wrong that asking again does not mend."""
THREAD_FROM = 4 << 20
"""Bytes of weights from which they are applied in a thread."""


class Superseded(Exception):
    """The publisher no longer holds what was asked for."""


class Subscriber:
    """Keeps `engine` at the newest announced version; `applied(version, digest)` is told of each one. `keys` is the
    folder of keys, if there are any; `state` has the bits that the engine begins with, if it has any. After
    `sweep_every` versions the replica's digest is computed anew from all bits."""

    def __init__(
        self,
        engine: RolloutEngine,
        name: str,
        applied: Callable[[int, str], None],
        *,
        state: State | None = None,
        sweep_every: int = 100,
        link_timeout: float | None = None,
        keys: str | None = None,
    ):
        self.engine, self.name, self.applied = engine, name, applied
        self._dealer_for = partial(AsyncDealer, link_timeout=link_timeout, keys=keys)
        self._newest: dict[str, Any] | None = None
        self._news = asyncio.Event()
        self._dealer: AsyncDealer | None = None
        self._endpoint = ""
        self._sweep_every = sweep_every
        self.replica = Replica(state)
        self.digests: dict[int, str] = {}
        self.full_syncs: Counter[str] = Counter()
        self.totals = dict.fromkeys(("weight_bytes", "fetch_seconds", "replica_seconds", "deltas", "anchors"), 0.0)

    def stats(self) -> dict[str, float]:
        """Running totals: bytes and seconds of fetching, seconds of applying to the replica, versions that came as
        deltas or with an anchor, and whole weights by reason."""
        by_reason = {f"full_syncs/{reason}": float(count) for reason, count in self.full_syncs.items()}
        return {**self.totals, "full_syncs": float(self.full_syncs.total()), **by_reason}

    def announce(self, manifest: dict[str, Any]) -> None:
        """A new version is there. Returns at once."""
        if self._newest is None or manifest["version"] >= self._newest["version"]:
            self._newest = manifest
            self._news.set()

    async def run(self) -> None:
        """Apply versions as they come, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            manifest = self._newest
            assert manifest is not None
            try:
                if manifest["version"] > self.engine.version:
                    await self.apply(manifest)
            except Superseded:
                log.info("version %d was overtaken before it was here", manifest["version"])
                continue
            await asyncio.sleep(0)  # generation goes on first, then the buffer is told
            self.applied(self.engine.version, self.engine.digest)

    async def apply(self, manifest: dict[str, Any]) -> None:
        """Fetch, verify and load one version. Raises BusError when the publisher sends wrong bits again and again."""
        version, digest = manifest["version"], manifest["digest"]
        self.digests[version] = digest
        self.replica.shape(self._specs(manifest), manifest["block_bytes"])
        held = self.replica.same_bits(version, digest)
        if digest == self.engine.digest:  # the same bits under a new number: nothing to transfer
            self.engine.version = version
            return
        for _ in range(0 if held else TRIES):
            try:
                await self._renew(manifest)
                break
            except Desync as error:
                self.replica.forget()
                self.full_syncs[error.reason] += 1
                log.warning("%s: version %d: %s; whole weights are fetched", self.name, version, error)
        if self.replica.version != version:
            raise BusError(f"{self.name}: version {version} arrived with wrong bits {TRIES} times")
        await asyncio.sleep(0)  # sequences that run get a decode step here: they stand still for the load alone
        await self.engine.load(Update(version, digest, self.replica.state))

    def _specs(self, manifest: dict[str, Any]) -> list[TensorSpec]:
        specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in manifest["tensors"]]
        unknown = {spec.dtype for spec in specs} - set(BITS)
        if unknown or sum(spec.space for spec in specs) != manifest["bytes"]:
            raise BusError(f"{self.name}: the manifest of version {manifest['version']} does not add up")
        return specs

    async def _renew(self, manifest: dict[str, Any]) -> None:
        """Bring the replica to the manifest's version. Raises Desync, Superseded."""
        replica, begin = self.replica, time.monotonic()
        self._connect(manifest["endpoint"])
        anchor, messages = None, []
        for base, version, nbytes, checksum in await self._plan(manifest["version"]):
            if base == NOTHING:
                anchor = version
                if replica.version != NOTHING:
                    self.full_syncs["no way from here"] += 1
                replica.forget()
                await self._fetch(base, version, self._room(nbytes, replica.state.nbytes, replica.state.buffer))
                continue
            message = self._room(nbytes, largest(replica.layout))
            await self._fetch(base, version, message)
            if xxhash.xxh3_64_hexdigest(message.data) != checksum:
                raise Desync("wrong checksum", f"of the delta from version {base}")
            messages.append(message.data)
        fetched = time.monotonic()
        await self._take(anchor, messages, manifest)
        self.totals["fetch_seconds"] += fetched - begin
        self.totals["replica_seconds"] += time.monotonic() - fetched
        self.totals["deltas" if anchor is None else "anchors"] += 1

    async def _take(self, anchor: int | None, messages: list[memoryview], manifest: dict[str, Any]) -> None:
        def work() -> None:
            self.replica.take(anchor, messages, manifest["version"], manifest["digest"])
            taken = self.totals["anchors"] + self.totals["deltas"] + 1
            if taken % self._sweep_every == 0 and not self.replica.sweep():
                raise Desync("wrong sweep", "bits of the replica have changed by themselves")

        if self.replica.state.nbytes < THREAD_FROM:
            work()
        else:
            await asyncio.to_thread(work)

    @staticmethod
    def _room(nbytes: int, most: int, memory: np.ndarray | None = None) -> np.ndarray:
        """uint8 [nbytes]; `memory` has just the right size. Raises Desync if that is more than there can be."""
        if not 0 <= nbytes <= most or (memory is not None and nbytes != memory.nbytes):
            raise Desync("wrong size", f"{nbytes} bytes are announced")
        return np.empty(nbytes, np.uint8) if memory is None else memory

    # ---- the publisher ----------------------------------------------------------------------------------------------

    async def _plan(self, version: int) -> list[tuple[int, int, int, str]]:
        """(base, version, bytes, checksum) of each part that leads from what is held to a version. Raises Superseded
        where none do."""
        assert self._dealer
        body = {"version": version, "held": self.replica.version, "digest": self.replica.digest}
        self._dealer.send("sync", body)
        while True:
            message = await self._receive()
            if message is None:
                self._dealer.send("sync", body)
            elif message.kind == "plan" and message.body["version"] == version:
                break
        parts = message.body["parts"]
        if not parts:
            raise Superseded
        for row in parts:
            if not isinstance(row, list) or [type(each) for each in row] != [int, int, int, str]:
                raise Desync("wrong plan")
        return [tuple(row) for row in parts]

    async def _receive(self) -> Message | None:
        """The next message, or None where none has come for too long."""
        assert self._dealer
        try:
            return await asyncio.wait_for(self._dealer.receive(), RETRY_SECONDS)
        except TimeoutError:
            self._dealer.link.check()
            log.warning("the publisher has sent nothing for %.0f s", RETRY_SECONDS)
            return None

    async def _fetch(self, base: int, version: int, into: np.ndarray) -> None:
        """Fill `into` with a part."""
        offsets = iter(range(0, into.nbytes, CHUNK_BYTES))
        waiting: set[int] = set()

        def ask(offset: int | None) -> None:
            if offset is not None:
                assert self._dealer
                waiting.add(offset)
                self._dealer.send("fetch", {"base": base, "version": version, "offset": offset, "size": CHUNK_BYTES})

        for _ in range(CHUNKS_IN_FLIGHT):
            ask(next(offsets, None))
        while waiting:
            message = await self._receive()
            if message is None:
                for offset in sorted(waiting):
                    ask(offset)
                continue
            body = message.body
            if message.kind == "gone" and body["version"] == version:
                raise Superseded
            if message.kind != "chunk" or (body["base"], body["version"]) != (base, version):
                continue  # left over from a fetch that was given up
            offset = body["offset"]
            if offset not in waiting:
                continue
            expected = min(CHUNK_BYTES, into.nbytes - offset)
            if message.payload.nbytes != expected:
                raise Desync("wrong size", f"a chunk of {message.payload.nbytes} bytes where {expected} were asked for")
            into[offset : offset + expected] = np.frombuffer(message.payload, np.uint8)
            self.totals["weight_bytes"] += expected
            waiting.discard(offset)
            ask(next(offsets, None))

    def _connect(self, endpoint: str) -> None:
        if self._dealer is None or endpoint != self._endpoint:
            self.close()
            self._dealer = self._dealer_for(endpoint, self.name, "learner's publisher")
            self._endpoint = endpoint

    def close(self) -> None:
        if self._dealer:
            self._dealer.close()
