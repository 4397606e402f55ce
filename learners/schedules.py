"""Learning rate schedules: those of transformers, as functions of the optimizer step.

They depend on the step alone, so a checkpoint needs only the number of steps made.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import get_scheduler

from areal_like.config.defaults import RANDOM_LR


class Schedule:
    """The rate of each optimizer step: lr · (step + 1) / `warmup_steps` at first, then `lr` (`constant`), or falling to
    0 after `total_steps` steps (`linear`, `cosine`; arXiv 1608.03983). `lr` None: as for random weights; `warmup_steps`
    None: 0.

    transformers begins with a rate of 0, which would waste a batch: its step 1 is the first one here. Raises ValueError
    for a warm-up that is negative, or leaves no step to fall in.
    """

    def __init__(
        self, lr: float | None = None, name: str = "constant", warmup_steps: int | None = None, total_steps: int = 0
    ):
        self.lr, warmup = RANDOM_LR if lr is None else lr, warmup_steps or 0
        if warmup < 0:
            raise ValueError(f"warmup_steps must not be negative, got {warmup}")
        if name != "constant" and total_steps <= warmup:
            raise ValueError(
                f"learner.warmup_steps={warmup}: a {name} schedule of {total_steps} optimizer steps leaves none to "
                "fall in; lower it, or raise run.steps (learner.schedule_steps)"
            )
        self._last = float("inf") if name == "constant" else total_steps
        theirs = "constant_with_warmup" if name == "constant" else name
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # a scheduler wants one
        made = get_scheduler(theirs, optimizer, num_warmup_steps=max(1, warmup), num_training_steps=total_steps + 1)
        self._share = made.lr_lambdas[0]  # type: ignore[attr-defined]

    def rate(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0."""
        return self.lr * self._share(min(step, self._last) + 1)  # behind its end a cosine would rise again
