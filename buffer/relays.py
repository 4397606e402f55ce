"""Which actor gets weights from which: a tree with the learner's publisher at its root. Each node serves `fanout`
others.

The places of the tree are numbered row by row. Place i gets its weights from place i // fanout - 1; the first `fanout`
places get them from the publisher. The last actor takes the place of one that leaves, so few others get a new parent.
Each actor gets a list of all above it, nearest first. If one of them has died, the actor asks the next; the buffer's
next announcement corrects the list. Actors that do not serve others get a place at the end. No I/O.
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
        """Add an actor that offers to serve others."""
        if name not in self._offers:
            self._names.append(name)
        self._offers[name] = endpoint, key

    def leave(self, name: str) -> None:
        if self._offers.pop(name, None):
            place, last = self._names.index(name), self._names.pop()
            if last != name:
                self._names[place] = last

    def above(self, name: str) -> list[Offer]:
        """The actors that this actor must ask, in this order, before it asks the publisher."""
        if not self._fanout:
            return []
        place = self._names.index(name) if name in self._offers else len(self._names)
        found = []
        while (place := place // self._fanout - 1) >= 0:
            found.append(self._offers[self._names[place]])
        return found
