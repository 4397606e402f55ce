"""The learning rate of each optimizer step."""

from __future__ import annotations

import math

from areal_like.config.defaults import RANDOM_LR


class Schedule:
    """A learning rate schedule, as a function of the optimizer step alone: lr · (step + 1) / `warmup_steps` at first,
    then `lr` (`constant`), or falling to 0 after `total_steps` steps (`linear`, `cosine`; arXiv 1608.03983). `lr` None:
    as for random weights; `warmup_steps` None: 0. As transformers' schedules, without their first step of rate 0."""

    def __init__(
        self, lr: float | None = None, name: str = "constant", warmup_steps: int | None = None, total_steps: int = 0
    ):
        self.lr, self._name = RANDOM_LR if lr is None else lr, name
        self._warmup, self._total = max(1, warmup_steps or 0), total_steps

    def rate(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0."""
        number, end = step + 1, self._total + 1
        if number < self._warmup:
            return self.lr * number / self._warmup
        if self._name == "constant":
            return self.lr
        left = max(0.0, (end - number) / max(1, end - self._warmup))
        return self.lr * (left if self._name == "linear" else 0.5 * (1.0 - math.cos(math.pi * left)))
