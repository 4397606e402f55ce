"""What agents of this process have done so far: totals that heartbeats carry (`actors.measures`), all or none.

`turns`: answers that were given. `turns_left_out`: of those, not in the conversation that is trained. `refused`:
requests that were answered by an error. `fields_ignored`: sampling fields of requests that were passed over
(`sampling: ignore`). `crashes`: samples that an agent's failure has cost.
"""

from __future__ import annotations

from collections import Counter

NAMES = ("turns", "turns_left_out", "refused", "fields_ignored", "crashes")
TOTALS: Counter[str] = Counter()


def stats() -> dict[str, float]:
    return {f"sum:agents/{name}": float(TOTALS[name]) for name in NAMES} if TOTALS else {}
