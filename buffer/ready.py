"""Actors that may have room for a lease, fewest groups first. It does not scan all actors: one that does not change
keeps its place.

    touch ─► waits for the next turn ─► the queue of the version that it holds ─► `first`
                                                                                  ├─ leased: its new place in the queue
                                                                                  ├─ `has_no_room`: out, until touched
                                                                                  └─ `skip`: behind, until the next turn
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from buffer.actor import Actor

_Key = tuple[int, int, str]
"""Groups, number, name."""
SLACK = 64
"""Old keys are removed from a queue that has more than twice its valid keys plus this many."""


class Ready:
    """An actor that is not in here had no room for a group of `full_for` sequences, and has not changed since."""

    def __init__(self) -> None:
        self.full_for = math.inf
        self._touched: dict[str, Actor] = {}
        self._placed: dict[str, tuple[int, _Key, Actor]] = {}  # by name: its version, its valid key
        self._queues: defaultdict[int, list[_Key]] = defaultdict(list)  # by version: heap of keys, some of them old
        self._sizes = Counter[int]()  # by version: valid keys
        self._barred: Collection[str] = ()
        self._skipped: dict[str, Actor] = {}
        self._skipped_versions = set[int]()

    def __contains__(self, name: str) -> bool:
        return any(name in known for known in (self._touched, self._placed, self._skipped))

    def touch(self, actor: Actor) -> None:
        """The actor changed, so it may have room now."""
        self._touched[actor.name] = actor

    def discard(self, name: str) -> None:
        self._touched.pop(name, None)
        self._skipped.pop(name, None)
        self._remove(name)

    def begin(self, sequences: int, everybody: Iterable[Actor], barred: Collection[str]) -> None:
        """Begin a turn for groups of at least this many sequences. `everybody`: used only if this is the smallest
        number so far. `barred`: names of actors that get no leases."""
        if sequences < self.full_for < math.inf:
            self._touched, self.full_for = {actor.name: actor for actor in everybody}, math.inf
        for actor in (*self._touched.values(), *self._skipped.values()):
            if actor.takes(sequences):
                self._put(actor)
            else:
                self.has_no_room(actor, sequences)
        self._touched.clear()
        self._skipped.clear()
        self._skipped_versions.clear()
        self._barred = barred

    def first(self) -> Actor | None:
        """The actor with the fewest groups; among equals, the one that joined first."""
        best = None
        for version in [*self._queues]:
            if version not in self._skipped_versions and (key := self._head(version)) and (best is None or key < best):
                best = key
        return self._placed[best[2]][2] if best else None

    def has_no_room(self, actor: Actor, sequences: int) -> None:
        """The actor can't take a group of this many sequences until it is touched."""
        self._remove(actor.name)
        self.full_for = min(self.full_for, sequences)

    def skip(self, actor: Actor) -> None:
        """It gets nothing more in this turn."""
        self._remove(actor.name)
        self._skipped[actor.name] = actor

    def skip_version(self, version: int) -> None:
        """Actors that hold this version get nothing more in this turn."""
        self._skipped_versions.add(version)

    def _head(self, version: int) -> _Key | None:
        """The first valid key of a queue."""
        queue = self._queues[version]
        while queue:
            key = queue[0]
            at, valid, actor = self._placed.get(key[2], (None, None, None))
            if actor is None or at != version or valid != key:
                heapq.heappop(queue)
            elif key[2] in self._barred:
                self.skip(actor)
            elif actor.version != version:
                self._put(actor)
            elif key[0] != len(actor.running):  # it was leased a group
                key = len(actor.running), actor.number, actor.name
                self._placed[actor.name] = version, key, actor
                heapq.heapreplace(queue, key)
            else:
                return key
        del self._queues[version]
        return None

    def _put(self, actor: Actor) -> None:
        key, version = (len(actor.running), actor.number, actor.name), actor.version
        at, valid, known = self._placed.get(actor.name, (None, None, None))
        if (at, valid) == (version, key) and known is actor:
            return
        self._remove(actor.name)
        if version < 0:
            return  # it has no weights yet
        self._placed[actor.name] = version, key, actor
        queue = self._queues[version]
        self._sizes[version] += 1
        heapq.heappush(queue, key)
        if len(queue) > 2 * self._sizes[version] + SLACK:
            queue[:] = [key for at, key, _ in self._placed.values() if at == version]
            heapq.heapify(queue)

    def _remove(self, name: str) -> None:
        if found := self._placed.pop(name, None):
            self._sizes[found[0]] -= 1
            if not self._sizes[found[0]]:
                del self._sizes[found[0]]
