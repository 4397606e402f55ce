"""What agents of this process have done so far: totals that heartbeats carry (`agents/*` in the metrics).

`agent_turns`: answers that were given. `agent_turns_left_out`: of those, not in the conversation that is trained.
`agent_refused`: requests that were answered by an error. `agent_fields_ignored`: sampling fields of requests that were
passed over (`sampling: ignore`). `agent_crashes`: samples that an agent's failure has cost.
"""

from __future__ import annotations

from collections import Counter

TOTALS: Counter[str] = Counter()


def stats() -> dict[str, float]:
    return {name: float(count) for name, count in TOTALS.items()}
