"""All actors together: the totals of their reports (`actors.measures`)."""

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
