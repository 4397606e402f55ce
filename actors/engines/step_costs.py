"""Seconds of decode steps and prefills of a run, as sums: `areal-like simulate --costs-from RUN` fits costs to them.

The time of a step runs to the begin of the next one, so it includes the work of the process between two; the prefill of
sequences that join, and weight updates, are not part of it."""

import json
from collections import deque
from pathlib import Path

import numpy as np

COSTS = "costs"
"""Folder of a run: `ROLE.json` of each actor."""
GROUPS = 256
"""The newest groups, whose lengths are kept."""


class StepCosts:
    """`steps`: sums over decode steps of the products of each two of (1, sequences, tokens that these hold, seconds),
    float64 [4, 4]. `prefill`: tokens of sequences that joined, and seconds. `lengths`: of groups' samples."""

    def __init__(self) -> None:
        self.steps = np.zeros((4, 4))
        self.prefill = np.zeros(2)
        self.lengths: deque[list[int]] = deque(maxlen=GROUPS)
        self._open: tuple[float, int, int] | None = None  # begin, sequences and tokens of the step under way

    def begin(self, now: float, sequences: int, tokens: int) -> None:
        self._open = now, sequences, tokens

    def end(self, now: float) -> None:
        if self._open is not None:
            begin, *counts = self._open
            values = np.array((1.0, *counts, now - begin))
            self.steps += values[:, None] * values
            self._open = None

    def prefilled(self, tokens: int, seconds: float) -> None:
        self.prefill += tokens, seconds

    def write(self, run: Path, role: str) -> None:
        """Raises OSError."""
        if self.steps.any():
            (run / COSTS).mkdir(exist_ok=True)
            found = {"steps": self.steps.tolist(), "prefill": self.prefill.tolist(), "lengths": list(self.lengths)}
            (run / COSTS / f"{role}.json").write_text(json.dumps(found), encoding="utf-8")
