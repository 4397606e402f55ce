"""Which actor gets weights from which."""

from __future__ import annotations


class RelayTree:
    """The learner's publisher at the root, actors numbered row by row. Each node serves `fanout` others (0: no tree,
    the publisher serves all): place i gets its weights from place i // fanout - 1. The last actor takes the place of
    one that leaves, so few others get a new parent."""

    def __init__(self, fanout: int = 0):
        self._fanout = fanout
        self._names: list[str] = []
        self._offers: dict[str, tuple[str, str]] = {}

    def join(self, name: str, endpoint: str, key: str) -> None:
        """Add an actor that offers to serve others; `key`: its public key ("": no keys)."""
        if name not in self._offers:
            self._names.append(name)
        self._offers[name] = endpoint, key

    def leave(self, name: str) -> None:
        if self._offers.pop(name, None):
            place, last = self._names.index(name), self._names.pop()
            if last != name:
                self._names[place] = last

    def above(self, name: str) -> list[tuple[str, str]]:
        """(endpoint, key) of the actors that this actor must ask, nearest first, before it asks the publisher. If one
        of them has died, the actor asks the next; the next announcement corrects the list."""
        if not self._fanout:
            return []
        place = self._names.index(name) if name in self._offers else len(self._names)
        found = []
        while (place := place // self._fanout - 1) >= 0:
            found.append(self._offers[self._names[place]])
        return found
