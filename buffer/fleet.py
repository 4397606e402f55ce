"""All actors together: the totals of their reports (`actors.measures`), and the tree in which weights reach them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean

OVER_PRESENT: dict[str, Callable[[list[float]], float]] = {"now": sum, "mean": fmean, "max": max}
"""How to combine the numbers of the present actors."""
MOST_METRICS = 256
"""Names that are shown: those that most actors report."""
Stats = Mapping[str, float | str]
"""The report of an actor: numbers, and the state of its engine in words."""


class Totals:
    """A process counts from 0; counts of an earlier process of that name stay included."""

    def __init__(self) -> None:
        self._counted: dict[str, tuple[bytes, Stats]] = {}  # by name: last report of its newest process
        self._before: Counter[str] = Counter()  # counts of processes that a newer one of the same name replaced

    def note(self, name: str, peer: bytes, stats: Stats) -> None:
        """Store the report of an actor with this name and routing id."""
        before, last = self._counted.get(name, (peer, {}))
        if before != peer:
            self._before.update(_numbers(last))
        self._counted[name] = peer, stats

    def metrics(self, of_present: Iterable[Stats]) -> dict[str, float]:
        """The reports, combined as the keys ask for. A sum never falls: it includes actors that left and earlier
        processes. `of_present`: the reports of the present actors."""
        sums, present = self._before.copy(), [_numbers(stats) for stats in of_present]
        reporting = Counter[str]()
        for _, stats in self._counted.values():
            sums.update(_numbers(stats))
            reporting.update(stats.keys())
        shown = {name for name, _ in reporting.most_common(MOST_METRICS)}
        found: dict[str, float] = {}
        for key, total in sums.items():
            how, _, metric = key.partition(":")
            if key not in shown:
                continue
            if how == "sum":
                found[metric] = total
            elif how == "part":
                whole = sums[f"whole:{metric}"]
                found[metric] = total / whole if whole else 0.0
            elif how in OVER_PRESENT and (here := [stats[key] for stats in present if key in stats]):
                found[metric] = OVER_PRESENT[how](here)
        return found


def _numbers(stats: Stats) -> dict[str, float]:
    return {key: value for key, value in stats.items() if isinstance(value, float)}


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
