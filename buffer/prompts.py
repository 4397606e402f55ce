"""The order of prompts: every row once per epoch, shuffled again for each epoch, fixed by the seed.

A group's id is its prompt's place in this order. So the id determines epoch and row, and the cursor is one number.
"""

from __future__ import annotations

import numpy as np


class PromptCursor:
    """Iterates over `size` training rows, epoch after epoch, from `position` on."""

    def __init__(self, size: int, seed: int, position: int = 0):
        if size < 1:
            raise ValueError("the task has no training prompts")
        self.size = size
        self.seed = seed
        self.position = position
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def next(self) -> tuple[int, int]:
        """(group id, row) of the next prompt."""
        group_id, self.position = self.position, self.position + 1
        epoch, place = divmod(group_id, self.size)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
            self._epoch = epoch
        return group_id, int(self._order[place])
