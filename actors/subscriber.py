"""Weights in: fetches announced versions while the engine generates, verifies them, and applies them in one go.

    announcement ─► sync (held version, digest) ─► plan ─► hops, in chunks ─► checked ─► applied to the replica ─► load

Waits for an announcement (unblocked by the buffer) and then for the plan and chunks (unblocked by the publisher, or by
a relay: `actors.sources`) of each part of the weights, one per rank of the learner. The replica
(`areal_like.weights.replica`) lies beside the live weights, on a GPU where the engine computes there; only with all of
a version in it and a right digest does the engine get the update, between two decode steps. A thread applies large
updates, so generation continues. Overtaken versions are skipped. Each mismatch (a checksum, a base, a digest) is
counted by reason, and leads to whole weights.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from actors import sources
from actors.fetcher import Fetcher
from actors.probe_check import ServedProbe
from actors.relay import Relay
from actors.sources import Sources, Superseded, Unreachable
from areal_like.interfaces import RolloutEngine
from areal_like.run.spans import Spans
from areal_like.weights.replica import NOTHING, Desync, Replica, Route, Update
from areal_like.weights.state import BITS, State, TensorSpec
from areal_like.wire.bus import AsyncDealer
from areal_like.wire.link import BusError
from areal_like.wire.messages import Manifest

log = logging.getLogger(__name__)
TRIES = 3
"""Wrong weights in a row, the last ones whole, after which another request does not help."""
THREAD_FROM = 4 << 20
"""Above this size weights are applied in a thread."""


class Subscriber:
    """Keeps `engine` at the newest announced version; calls `applied(version, digest)` for each one. `state` has the
    bits that the engine begins with, if it has any. After `sweep_every` versions the replica's digest is recomputed
    from all bits. A `relay` passes the held weights on, a `probe` asks the engine what it computes with them."""

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
        spans: Spans | None = None,
    ):
        self.engine, self.name, self.applied = engine, name, applied
        self._spans = spans or Spans()
        self.sources = Sources(name, partial(AsyncDealer, link_timeout=link_timeout, keys=keys, role="actor"))
        self.relay: Relay | None = None
        self.probe: ServedProbe | None = None
        self._newest: Manifest | None = None
        self._news, self._sweep_every = asyncio.Event(), sweep_every
        self.replica: Replica = getattr(engine, "replica_of", Replica)(state)
        self.fetcher = Fetcher(self.sources, self.replica)
        self.digests: dict[int, str] = {}
        self.full_syncs: Counter[str] = Counter()
        self.totals = dict.fromkeys(("fetch_seconds", "replica_seconds", "deltas", "base_snapshots"), 0.0)

    def stats(self) -> dict[str, float]:
        """Running totals: bytes and seconds of fetching, bytes from relays and to others, relays that were left,
        seconds of applying to the replica, versions as deltas or with a base snapshot, whole weights by reason."""
        found = self.totals | {
            "weight_bytes": self.sources.received,
            "weight_bytes_relayed": self.sources.relayed,
            "weight_bytes_served": self.relay.bytes_sent if self.relay else 0,
            "relays_left": self.sources.left,
            "full_syncs": self.full_syncs.total(),
        }
        found |= {f"full_syncs/{reason}": count for reason, count in self.full_syncs.items()}
        return {key: float(value) for key, value in found.items()}

    def announce(self, manifest: Manifest) -> None:
        if self._newest is None or manifest.version >= self._newest.version:
            self._newest = manifest
            self.digests[manifest.version] = manifest.digest
            self._news.set()

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            manifest = self._newest
            assert manifest is not None
            try:
                if manifest.version > self.engine.version:
                    await self.apply(manifest)
            except Superseded:
                log.info("version %d was overtaken before it was here", manifest.version)
                await self._overtaken()
                continue
            if self.engine.version < manifest.version:
                self._news.set()  # a relay has brought it half-way
            await asyncio.sleep(0)  # generation continues first, then the buffer is notified
            self.applied(self.engine.version, self.engine.digest)
            if self.probe and self.engine.version == manifest.version:
                self.probe.begin(manifest)

    async def _overtaken(self) -> None:
        """The version that overtook this one is announced soon, or a relay was wrong; ask again in any case."""
        try:
            await asyncio.wait_for(self._news.wait(), sources.PATIENCE_SECONDS)
        except TimeoutError:
            self.sources.leave("it has said that there is something newer, and there is not")
            self._news.set()

    async def apply(self, manifest: Manifest) -> None:
        """Fetch, verify and load a version, or the one that the plan led to. Raises Superseded; BusError for wrong bits
        again and again."""
        version, digest = manifest.version, manifest.digest
        self.digests[version] = digest
        self.replica.shape(self._specs(manifest), manifest.block_bytes, len(manifest.parts))
        held = self.replica.same_bits(version, digest)
        if held and self.relay:
            self.relay.add(self.replica, ())
        if digest == self.engine.digest:  # the same bits under a new number: nothing to transfer
            self.engine.version = version
            return
        self.sources.set(manifest)
        tries = 0 if held else TRIES
        while tries:
            try:
                version, digest = await self._renew(manifest)
                break
            except Unreachable as error:
                self.sources.leave(error)
            except Desync as error:
                tries -= not self.sources.leave(error)
                self.replica.forget()
                self.full_syncs[error.reason] += 1
                log.warning("%s: version %d: %s; whole weights are fetched", self.name, version, error)
        if self.replica.version != version:
            raise BusError(f"{self.name}: version {version} arrived with wrong bits {TRIES} times")
        await asyncio.sleep(0)  # sequences that run get a decode step here: they stand still for the load alone
        with self._spans.during("update"):
            await self.engine.load(Update(version, digest, self.replica.state, self.replica.changes()))

    def _specs(self, manifest: Manifest) -> list[TensorSpec]:
        specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in manifest.tensors]
        known = all(spec.dtype in BITS for spec in specs)
        if not known or sum(spec.space for spec in specs) != manifest.bytes or not manifest.parts:
            raise BusError(f"{self.name}: the manifest of version {manifest.version} does not add up")
        return specs

    async def _renew(self, manifest: Manifest) -> tuple[int, str]:
        """Bring the replica to the manifest's version, or to another one that was announced: returns which, and its
        digest. Raises Desync, Superseded, Unreachable."""
        begin = time.monotonic()
        plans = await self.fetcher.plans(manifest, lambda: self._newest)
        target = plans[0][-1][1]
        if target not in self.digests:
            raise Superseded
        whole = any(base == NOTHING for hops in plans for base, *_ in hops)
        if whole and self.replica.version != NOTHING:
            self.full_syncs["no route from here"] += 1
        routes = [await self.fetcher.fetch(part, hops, self.relay) for part, hops in enumerate(plans)]
        fetched = time.monotonic()
        await self._take(routes, target)
        self.totals["fetch_seconds"] += fetched - begin
        self.totals["replica_seconds"] += time.monotonic() - fetched
        self.totals["base_snapshots" if whole else "deltas"] += 1
        return target, self.digests[target]

    async def _take(self, routes: list[Route], version: int) -> None:
        def work() -> None:
            if self.relay:
                self.relay.begin(self.replica)
            self.replica.take(routes, version, self.digests[version])
            taken = self.totals["base_snapshots"] + self.totals["deltas"] + 1
            if taken % self._sweep_every == 0 and not self.replica.sweep():
                raise Desync("wrong sweep", "bits of the replica have changed by themselves")
            if self.relay:
                self.relay.add(self.replica, routes)

        if self.replica.state.nbytes < THREAD_FROM:
            work()
        else:
            await asyncio.to_thread(work)

    def close(self) -> None:
        self.sources.close()
        if self.relay:
            self.relay.close()
        if self.probe:
            self.probe.close()
