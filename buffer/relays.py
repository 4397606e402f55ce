"""Who gets weights from whom: a tree with the learner's publisher at its root, in which each serves `fanout` others.

The places of the tree are numbered row by row; place i gets its weights from place i // fanout - 1, the first `fanout`
from the publisher. Who leaves is replaced by the last, so that few others get another parent. An actor is told of all
that are above it, the nearest first: if one has died it turns to the next, and the buffer's next announcement knows
better. Actors that serve nobody are given a place at the end. No I/O.
"""

from __future__ import annotations

Offer = tuple[str, str]
"""Endpoint, and public key ("": no keys)."""


class Relays:
    """`fanout` 0: no tree, the publisher serves all."""

    def __init__(self, fanout: int = 0):
        self._fanout = fanout
        self._names: list[str] = []
        self._offers: dict[str, Offer] = {}

    def join(self, name: str, endpoint: str, key: str) -> None:
        """An actor offers to serve others."""
        if name not in self._offers:
            self._names.append(name)
        self._offers[name] = endpoint, key

    def leave(self, name: str) -> None:
        if self._offers.pop(name, None):
            place, last = self._names.index(name), self._names.pop()
            if last != name:
                self._names[place] = last

    def above(self, name: str) -> list[Offer]:
        """Whom this actor is to ask, one after the other, before it asks the publisher."""
        if not self._fanout:
            return []
        place = self._names.index(name) if name in self._offers else len(self._names)
        found = []
        while (place := place // self._fanout - 1) >= 0:
            found.append(self._offers[self._names[place]])
        return found
