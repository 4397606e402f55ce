"""Messages that a publisher or a relay can serve: the newest weights, the deltas that led there, and a base snapshot.

A subscriber names the version that it holds, and gets the shortest route from there to the newest one: the chain of
deltas, or a base snapshot (a copy of the whole weights, made on request when the last one is old) and the deltas after
it. Each part of the weights has its own history. No sockets; safe for several threads."""

import threading
from typing import NamedTuple

import numpy as np
import xxhash

from areal_like.weights.delta import Message
from areal_like.weights.layout import Layout
from areal_like.weights.replica import NOTHING
from areal_like.weights.state import State
from areal_like.wire.messages import MOST_HOPS

HEADS = 4096
"""Header allowance: prefer a dense delta to a base snapshot if it is at most this much larger."""


class Hop(NamedTuple):
    """One message of a route: from version `base` to `version`. `base` NOTHING: a base snapshot, without a checksum."""

    base: int
    version: int
    nbytes: int
    checksum: str


class History:
    """The last `keep` deltas are kept, and those since the base snapshot, as long as they are not more than twice the
    weights together; a base snapshot serves for at most `snapshot_every` versions."""

    def __init__(self, layout: Layout, *, keep: int, snapshot_every: int):
        self._layout, self._keep, self._snapshot_every = layout, keep, snapshot_every
        self._lock = threading.Lock()
        self._states: dict[int, State] = {}  # the two newest versions, whole
        self._chain: dict[int, tuple[Hop, Message, str]] = {}  # base → the delta to the next one, the base's digest
        self._base_snapshot: tuple[Hop, np.ndarray] | None = None
        self.version, self.digest = NOTHING, ""

    def add(self, version: int, digest: str, state: State | None, message: Message | None) -> None:
        """`state` is the newest now, and must not change until it is released (None: nobody holds it whole); `message`
        leads there from the one before (None: none does, and another line of versions may begin)."""
        checksum = "" if message is None else xxhash.xxh3_64_hexdigest(message)
        with self._lock:
            if message is None:
                self._chain.clear()
                if self._base_snapshot and version <= self._base_snapshot[0].version:
                    self._base_snapshot = None  # of an earlier line of versions, whose bits may be others
            else:
                hop = Hop(self.version, version, len(message), checksum)
                self._chain[self.version] = hop, message, self.digest
            self._states = {old: kept for old, kept in self._states.items() if old == self.version}
            if state is not None:
                self._states[version] = state
            self.version, self.digest = version, digest
            self._trim(self._layout.nbytes)

    def release(self, state: State) -> None:
        with self._lock:
            self._states = {version: kept for version, kept in self._states.items() if kept is not state}

    def plan(self, version: int, held: int, digest: str) -> list[Hop] | None:
        """Hops to fetch, in this order, to get to `version` from the version `held`, if its bits have that digest;
        empty if it is unreachable; None if it is not available yet."""
        with self._lock:
            if version > self.version:
                return None
            if held in self._chain and self._chain[held][2] == digest:
                route = self._route(held, version)
                if route and _size(route) <= self._layout.nbytes + HEADS:
                    return route
            return self._from_base_snapshot(version) or ([] if self._states else None)

    def payload(self, base: int, version: int) -> memoryview | None:
        with self._lock:
            if base == NOTHING:
                kept = self._base_snapshot
                return kept[1].data if kept and kept[0].version == version else None
            found = self._chain.get(base)
            return memoryview(found[1]) if found and found[0].version == version else None

    def _route(self, base: int, version: int) -> list[Hop]:
        """The chain between two versions; empty if there is none, or it is too long for a message."""
        hops = [hop for start, (hop, *_) in self._chain.items() if base <= start < version]
        whole = hops and hops[0].base == base and hops[-1].version == version
        return hops if whole and len(hops) < MOST_HOPS else []

    def _from_base_snapshot(self, version: int) -> list[Hop]:
        """Route by the base snapshot, if it is not too old; else by a new one, of the requested version if possible."""
        if self._base_snapshot:
            start = self._base_snapshot[0].version
            route = self._route(start, version)
            fresh = version - start < self._snapshot_every and _size(route) <= self._layout.nbytes // 2
            if fresh and (route or start == version):
                return [self._base_snapshot[0], *route]
        for start in sorted(self._states, reverse=True):
            route = self._route(start, version)
            if route or start == version:
                copy = self._base_snapshot[1] if self._base_snapshot else np.empty(self._layout.nbytes, np.uint8)
                self._layout.copy_out(self._states[start], copy)
                self._base_snapshot = (Hop(NOTHING, start, copy.nbytes, ""), copy)
                return [self._base_snapshot[0], *route]
        return []

    def _trim(self, nbytes: int) -> None:
        """Oldest first, drop what neither the number nor the base snapshot keeps, or what is too much."""
        wanted = self._base_snapshot[0].version if self._base_snapshot else self.version
        if self.version - wanted >= self._snapshot_every:
            wanted = self.version
        size = _size([hop for hop, *_ in self._chain.values()])
        for base in list(self._chain):
            kept = len(self._chain) <= self._keep or base >= wanted
            if kept and (size <= 2 * nbytes or len(self._chain) == 1):
                break
            size -= self._chain.pop(base)[0].nbytes


def _size(hops: list[Hop]) -> int:
    return sum(hop.nbytes for hop in hops)
