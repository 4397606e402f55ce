"""Messages that a publisher or a relay can serve: the newest weights, the deltas that led there, and a base snapshot.

A subscriber names the version that it holds, and gets the shortest route from there to the newest one: the chain of
deltas, one delta merged from them, or a base snapshot (whole weights) and the deltas after it. A base snapshot is a
copy of the newest weights, made on request when the last one is old. It does not change while it is fetched, and costs
nothing where nobody joins late. Merging takes a while and can run in a thread of its own: neither the learner nor
other subscribers wait for it. Each part of the weights has its own history. No sockets; safe for several threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from areal_like.weights.delta import Message
from areal_like.weights.layout import Layout
from areal_like.weights.merge import merge
from areal_like.weights.replica import NOTHING
from areal_like.weights.state import State

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hop:
    """One message of a route: leads from version `base` to `version`. `base` NOTHING: a base snapshot, whose digest is
    compared in place of a checksum."""

    base: int
    version: int
    nbytes: int
    checksum: str

    @staticmethod
    def of(base: int, version: int, message: Message) -> Hop:
        return Hop(base, version, len(message), xxhash.xxh3_64_hexdigest(message))

    def row(self) -> tuple[int, int, int, str]:
        return self.base, self.version, self.nbytes, self.checksum


MOST_HOPS = 32
"""Most deltas in a plan: more are merged, of any size."""

BESIDE_FROM = 4 << 20
"""Above this size, merge in a background thread if the caller passed wait=False."""

HEADS = 4096
"""Header allowance: prefer a dense delta to a base snapshot if it is at most this much larger."""


class History:
    """History of the weights with this layout. The last `keep` deltas are kept, and those since the base
    snapshot, as long as they are not more than twice the weights together; merged ones, as long as those are not more
    than half of them, so that a slow link gets to its end; a base snapshot serves for at most `snapshot_every`
    versions."""

    def __init__(self, layout: Layout, *, keep: int, snapshot_every: int):
        self._layout, self._keep, self._snapshot_every = layout, keep, snapshot_every
        self._lock = threading.Lock()
        self._states: dict[int, State] = {}  # the two newest versions, whole
        self._chain: dict[int, tuple[Hop, Message]] = {}  # base → the delta to the next version, without gaps
        self._merged: dict[tuple[int, int], tuple[Hop, bytes] | None] = {}  # None: no gain, or failed
        self._unmerged: tuple[int, int] | None = None  # the merged delta that the last plan lacked
        self._merging: threading.Thread | None = None
        self._digests: dict[int, str] = {}  # of the bases in the chain
        self._base_snapshot: tuple[Hop, np.ndarray] | None = None
        self.version, self.digest = NOTHING, ""

    def add(self, version: int, digest: str, state: State | None, message: Message | None) -> None:
        """`state` is the newest now, and must not change until it is released (None: nobody holds it whole); `message`
        leads there from the one before (None: none does, and another line of versions may begin)."""
        hop = None if message is None else Hop.of(self.version, version, message)
        with self._lock:
            if hop is None or message is None:
                self._merged.clear()
                self._chain.clear()
                self._digests.clear()
                if self._base_snapshot and version <= self._base_snapshot[0].version:
                    self._base_snapshot = None  # of an earlier line of versions, whose bits may be others
            else:
                self._chain[self.version] = (hop, message)
                self._digests[self.version] = self.digest
            self._merged = {ends: kept for ends, kept in self._merged.items() if kept}
            self._states = {old: kept for old, kept in self._states.items() if old == self.version}
            if state is not None:
                self._states[version] = state
            self.version, self.digest = version, digest
            self._trim(self._layout.nbytes)

    def release(self, state: State) -> None:
        """Release a state that is going to change."""
        with self._lock:
            self._states = {version: kept for version, kept in self._states.items() if kept is not state}

    def plan(self, version: int, held: int, digest: str, *, wait: bool = True) -> list[Hop] | None:
        """Hops to fetch, in this order, to get to `version` from the version `held`, if its bits have that digest;
        empty if it is unreachable; None if it is not available yet (the version is not published, or, without `wait`, a
        merge of large weights is running)."""
        while True:
            with self._lock:
                self._unmerged = None
                hops = self._planned(version, held, digest)
                if self._unmerged is None:
                    return hops
                work = (self._unmerged, self._deltas(*self._unmerged))
                if not wait and self._layout.nbytes >= BESIDE_FROM:
                    if not self._merging or not self._merging.is_alive():
                        self._merging = threading.Thread(target=self._merge, args=work, name="merging", daemon=True)
                        self._merging.start()
                    return None
            self._merge(*work)

    def _planned(self, version: int, held: int, digest: str) -> list[Hop] | None:
        """The plan as things are, unless something is `_unmerged`."""
        if version > self.version:
            return None
        route = self._route(held, version) if held < version and self._digests.get(held) == digest else []
        if self._unmerged or (route and _size(route) <= self._layout.nbytes + HEADS):
            return route
        return self._from_base_snapshot(version) or ([] if self._states else None)

    def _merge(self, ends: tuple[int, int], chain: Sequence[Message]) -> None:
        merged = None
        try:
            message = merge(chain, self._layout)
            if len(message) <= self._layout.nbytes + HEADS:  # else whole weights are shorter
                merged = (Hop.of(*ends, message), message)
        except Exception:
            log.exception("deltas of the versions %d to %d could not be merged; they are sent as they are", *ends)
        with self._lock:
            if self._deltas(*ends) == chain:  # else another line of versions has begun
                self._merged[ends] = merged
                kept = {each: found[0].nbytes for each, found in self._merged.items() if found}
                for old in list(kept)[:-1]:
                    if sum(kept.values()) > self._layout.nbytes // 2:
                        del kept[old], self._merged[old]

    def payload(self, base: int, version: int) -> memoryview | None:
        """The bytes of a hop, or nothing if they are gone."""
        with self._lock:
            if base == NOTHING:
                same = self._base_snapshot is not None and self._base_snapshot[0].version == version
                return self._base_snapshot[1].data if same and self._base_snapshot else None
            for found in (self._chain.get(base), self._merged.get((base, version))):
                if found and found[0].version == version:
                    return memoryview(found[1])
            return None

    def _route(self, base: int, version: int) -> list[Hop]:
        """The chain between two versions, or the merged delta if that is shorter; empty if there is no chain."""
        hops = [hop for start, (hop, _) in self._chain.items() if base <= start < version]
        if not hops or hops[0].base != base or hops[-1].version != version:
            return []
        if len(hops) > 1 and (base, version) not in self._merged:
            self._unmerged = (base, version)
        merged = self._merged.get((base, version))
        return [merged[0]] if merged and (merged[0].nbytes < _size(hops) or len(hops) > MOST_HOPS) else hops

    def _deltas(self, base: int, version: int) -> list[Message]:
        return [message for start, (_, message) in self._chain.items() if base <= start < version]

    def _from_base_snapshot(self, version: int) -> list[Hop]:
        """Route by the base snapshot, if it is not too old; else by a new one, of the requested version if possible."""
        if self._base_snapshot:
            start = self._base_snapshot[0].version
            fresh = version - start < self._snapshot_every
            route = self._route(start, version) if fresh else []
            fresh = fresh and _size(route) <= self._layout.nbytes // 2
            if self._unmerged or (fresh and (route or start == version)):
                return [self._base_snapshot[0], *route]
        for start in sorted(self._states, reverse=True):
            route = self._route(start, version)
            if route or start == version:
                copy = self._base_snapshot[1] if self._base_snapshot else np.empty(self._layout.nbytes, np.uint8)
                self._layout.copy_out(self._states[start].buffer, copy)
                self._base_snapshot = (Hop(NOTHING, start, copy.nbytes, ""), copy)
                return [self._base_snapshot[0], *route]
        return []

    def _trim(self, nbytes: int) -> None:
        """Oldest first, drop what neither the number nor the base snapshot keeps, or what is too much."""
        wanted = self._base_snapshot[0].version if self._base_snapshot else self.version
        if self.version - wanted >= self._snapshot_every:
            wanted = self.version
        size = _size([hop for hop, _ in self._chain.values()])
        for base in list(self._chain):
            kept = len(self._chain) <= self._keep or base >= wanted
            if kept and (size <= 2 * nbytes or len(self._chain) == 1):
                break
            size -= self._chain.pop(base)[0].nbytes
            del self._digests[base]


def _size(hops: list[Hop]) -> int:
    return sum(hop.nbytes for hop in hops)
