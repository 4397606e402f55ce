"""Totals of this process's agents, which heartbeats carry (`actors.measures`), all or none.

`turns`: answers given. `turns_left_out`: answers that are not in the trained conversation. `refused`: requests answered
by an error. `fields_ignored`: ignored sampling fields of requests (`sampling: ignore`). `crashes`: samples lost to an
agent's failure.
"""

from __future__ import annotations

from collections import Counter

NAMES = ("turns", "turns_left_out", "refused", "fields_ignored", "crashes")
TOTALS: Counter[str] = Counter()


def stats() -> dict[str, float]:
    return {f"sum:agents/{name}": float(TOTALS[name]) for name in NAMES} if TOTALS else {}
