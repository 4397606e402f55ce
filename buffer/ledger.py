"""The ledger: every admitted group is trained, filtered, dropped or active."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import NotRequired, TypedDict


class Ledger(TypedDict):
    """Every admitted group: admitted = trained + sum(filtered) + sum(dropped) + active. `tasks`: a mixture's."""

    admitted: int
    trained: int
    filtered: dict[str, int]
    dropped: dict[str, int]
    active: int
    tasks: NotRequired[dict[str, Ledger]]


def ledger_of(counts: Mapping[str, int], active: int) -> Ledger:
    """The ledger of one task, from its counts by fate."""
    by_kind: dict[str, dict[str, int]] = {"filtered": {}, "dropped": {}}
    for fate, count in counts.items():
        kind, colon, reason = fate.partition(": ")
        if colon:
            by_kind[kind][reason] = count
    admitted, trained = (counts.get(fate, 0) for fate in ("admitted", "trained"))
    return {"admitted": admitted, "trained": trained, "active": active, **by_kind}  # type: ignore[typeddict-item]


class Counts:
    """Groups so far by fate: "admitted", "trained", "filtered: REASON", "dropped: REASON". `fates`: of all groups under
    "", and of each task of a mixture under its name."""

    def __init__(self, fates: Mapping[str, Mapping[str, int]] | None = None):
        known = fates or {"": {"admitted": 0, "trained": 0}}
        self.fates = defaultdict(Counter[str], {task: Counter(counts) for task, counts in known.items()})

    def note(self, task: str, fate: str) -> None:
        self.fates[""][fate] += 1
        if task:
            self.fates[task][fate] += 1

    @property
    def admitted(self) -> int:
        return self.fates[""]["admitted"]

    @property
    def trained(self) -> int:
        return self.fates[""]["trained"]

    def ledger(self, tasks: Collection[str]) -> Ledger:
        """`tasks`: of each active group; "": there is no mixture."""
        of, found = Counter(tasks), ledger_of(self.fates[""], len(tasks))
        if len(self.fates) > 1:
            found["tasks"] = {task: ledger_of(counts, of[task]) for task, counts in self.fates.items() if task}
        return found

    def metrics(self, active: int) -> dict[str, object]:
        found: dict[str, object] = {"ledger/active": active}
        for task, counts in self.fates.items():
            start = f"ledger_of/{task}" if task else "ledger"
            found |= {f"{start}/{fate.replace(': ', '/')}": n for fate, n in counts.items()}
        return found
