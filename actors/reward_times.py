"""A verifier's time limit, from the times of right answers: RollPacker's adaptive timeout (arXiv 2509.21009).

    limit = min(max(T_min, λ · T_anchor), T_max)

T_anchor is the slowest call for the same case (prompt) whose answer was right, i.e. scored 1 or more; a case that has
none yet gets T_max. Kept in memory only, for the cases used last: a restarted actor starts without any."""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np

CASES = 65536
"""Number of cases whose anchor is remembered; the least recently used goes first."""
LATEST = 1024
"""Number of calls for the quantiles."""


class RewardTimes:
    """`shortest` (T_min) and `longest` (T_max) in seconds, `slack` is λ. Raises ValueError where they make no sense."""

    def __init__(self, shortest: float, longest: float, slack: float, cases: int = CASES):
        if not 0 < shortest <= longest or slack < 1:
            raise ValueError(
                f"reward times: want 0 < min_timeout <= timeout and slack >= 1, got {shortest}, {longest}, {slack}"
            )
        self._shortest, self._longest, self._slack, self._cases = shortest, longest, slack, cases
        self._anchors: OrderedDict[int, float] = OrderedDict()
        self._seconds: deque[float] = deque(maxlen=LATEST)

    def limit(self, case: int | None) -> float:
        """Seconds that a call for this case may take."""
        if case is None or case not in self._anchors:
            return self._longest
        self._anchors.move_to_end(case)
        return min(max(self._shortest, self._slack * self._anchors[case]), self._longest)

    def add(self, case: int | None, score: float, seconds: float) -> None:
        """Record an answered call."""
        self._seconds.append(seconds)
        if case is not None and score >= 1:
            self._anchors[case] = max(self._anchors.get(case, 0.0), seconds)
            self._anchors.move_to_end(case)
            if len(self._anchors) > self._cases:
                self._anchors.popitem(last=False)

    def quantiles(self) -> dict[str, float]:
        """A quantile of the latest answered calls, in seconds; 0 without any."""
        p50, p99 = np.quantile(self._seconds, [0.5, 0.99]) if self._seconds else (0.0, 0.0)
        return {"seconds_p50": float(p50), "seconds_p99": float(p99)}
