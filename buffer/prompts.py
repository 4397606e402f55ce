"""The order of prompts: every row once per epoch, shuffled again for each epoch, fixed by the seed.

A group's id is its prompt's place in this order. In a mixture the tasks take turns in shuffled blocks, in which each
has as many prompts as its ratio; each task has its own epochs."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from areal_like.interfaces import Task


class Share(NamedTuple):
    """A task's part of the training rows: name ("": the only task), first row, number of rows, prompts per block."""

    name: str
    first: int
    size: int
    per_block: int


def shares_of(task: Task) -> list[Share]:
    """The parts of a task's training rows: one, or those of a mixture's tasks."""
    members = getattr(task, "members", None)
    if members is None:
        return [Share("", 0, task.size("train"), 1)]
    mixture, sizes = task, [each.size("train") for each in members.values()]
    names = zip(members, sizes, strict=True)
    return [Share(n, sum(sizes[:at]), size, mixture.ratios[n]) for at, (n, size) in enumerate(names)]  # type: ignore[attr-defined]


class PromptPlace(NamedTuple):
    """A prompt's place in the order: the id of its group, its row, and its task's name in a mixture (else "")."""

    group_id: int
    row: int
    task: str = ""


class PromptCursor:
    """Iterates over training rows from `position` on. `shares`: the parts of the rows, or the rows of a single task,
    counted."""

    def __init__(self, shares: int | Sequence[Share], seed: int, position: int = 0):
        self.shares = [Share("", 0, shares, 1)] if isinstance(shares, int) else list(shares)
        for share in self.shares:
            if share.size < 1:
                raise ValueError(f"the task {share.name} has no training prompts".replace("  ", " "))
        self.seed = seed
        self.position = position
        self._block = sum(share.per_block for share in self.shares)
        self._turns: tuple[int, np.ndarray] = -1, np.empty(0, np.int64)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # by share: its epoch, and the order of its rows

    def next(self) -> PromptPlace:
        """The next prompt."""
        self.position += 1
        return self.at(self.position - 1)

    def at(self, group_id: int) -> PromptPlace:
        """The prompt of a group."""
        number, before = self._turn(group_id)
        share = self.shares[number]
        epoch, place = divmod(before, share.size)
        return PromptPlace(group_id, share.first + self._order_of(number, epoch).item(place), share.name)

    def _turn(self, group_id: int) -> tuple[int, int]:
        """Which share the prompt of a group belongs to, and how many prompts of that share come before it."""
        if len(self.shares) == 1:
            return 0, group_id
        block, place = divmod(group_id, self._block)
        turns = self._turns_of(block)
        number = int(turns[place])
        return number, block * self.shares[number].per_block + int(np.count_nonzero(turns[:place] == number))

    def _turns_of(self, block: int) -> np.ndarray:
        """Which share each place of a block belongs to."""
        if self._turns[0] != block:
            turns = np.repeat(np.arange(len(self.shares)), [share.per_block for share in self.shares])
            self._turns = block, np.random.default_rng([self.seed, block, 0, 1]).permutation(turns)
        return self._turns[1]

    def _order_of(self, number: int, epoch: int) -> np.ndarray:
        if number not in self._orders or self._orders[number][0] != epoch:
            key = (self.seed, epoch, *([number] if number else []))
            self._orders[number] = epoch, _permutation(key, self.shares[number].size)
        return self._orders[number][1]


@functools.lru_cache(maxsize=1)
def _permutation(key: tuple[int, ...], size: int) -> np.ndarray:
    """The order of a share's rows. Kept for planners, which simulate hundreds of runs."""
    return np.random.default_rng(key).permutation(size)
