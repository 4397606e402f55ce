"""Ends a run whose verifier hangs. An answer whose check exceeds its time limit earns 0. So with a verifier that always
hangs, a run would look healthy but learn nothing. No I/O.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from buffer.actor import Stats
from buffer.checks import RolloutsFail

MOST_ANSWERS = 32
"""The most answers that the check considers, even if a batch has more: each may take its full time."""


@dataclass(slots=True)
class VerifierTimeouts:
    """Counts answers and late answers (over `timeout` seconds) of the verifier `name`, from the totals that actors
    report. The run ends if the late share of the newest `window` answers reaches `limit` (None: never)."""

    name: str = ""
    timeout: float = 0.0
    limit: float | None = None
    window: int = MOST_ANSWERS
    _totals: dict[str, tuple[float, float]] = field(default_factory=dict)
    _newest: deque[tuple[float, float]] = field(default_factory=deque)

    def see(self, actor: str, stats: Stats) -> None:
        """Note an actor's totals; they restart when the actor does. Raises RolloutsFail."""
        totals = float(stats.get("sum:rewards/answered", 0.0)), float(stats.get("sum:rewards/timeouts", 0.0))
        before = self._totals.get(actor, (0.0, 0.0))
        self._totals[actor] = totals
        answered, late = totals if totals[0] < before[0] else (totals[0] - before[0], totals[1] - before[1])
        if answered > 0:
            self._newest.append((answered, late))
            self._check()

    def _check(self) -> None:
        answered = sum(each for each, _ in self._newest)
        while answered - self._newest[0][0] >= self.window:
            answered -= self._newest.popleft()[0]
        late = sum(each for _, each in self._newest)
        if self.limit is not None and answered >= self.window and late >= self.limit * answered:
            raise RolloutsFail(
                f"{late:.0f} of the last {answered:.0f} answers earned 0: the verifier of task {self.name} overran "
                f"rewards.timeout ({self.timeout:g} s). It hangs or needs more time; see rewards.max_timeouts"
            )
