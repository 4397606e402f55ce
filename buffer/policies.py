"""Which groups make the next batch, and which finished groups are worth training on. Pure functions.

Batch policies: (waiting, missing, want, *, knobs) → ids in batch order, or ().

    in_order   the order of admission (that of the prompts); waits for stragglers; can't break the bound
    fifo       first finished, first trained; never waits for a straggler

A policy states a preference. The other groups must still fit under the staleness bound (`GroupManager.serve`).

Filters: (rewards, lengths, *, knobs) → "" to keep, or a reason. `rewards` and `lengths` (response tokens) have one
entry per sample of a group. A filtered group counts under its reason; another prompt gets its slot.
"""

import math
from collections.abc import Sequence, Set

import msgspec

from areal_like.wire.groups import Head


class Waiting(msgspec.Struct, frozen=True):
    """A group that can be served. `slot`: its place in the order of training. `oldest`: version of its oldest token.
    `pushed`: its place in the order of finishing. `left`: for how many versions it can wait without breaking the bound
    (inf: no limit). `head`: lengths, rewards and versions of its samples."""

    id: int
    slot: int
    oldest: int
    pushed: int
    left: float
    head: Head | None = None


def in_order(waiting: Sequence[Waiting], missing: Set[int], want: int) -> tuple[int, ...]:
    """The `want` lowest slots, once all of them can be served. `missing`: slots in use, or left by a dropped group,
    without a group to serve; one below the batch's last means wait."""
    chosen = sorted(waiting, key=lambda group: group.slot)[:want]
    if len(chosen) < want or min(missing, default=math.inf) < chosen[-1].slot:
        return ()
    return tuple(group.id for group in chosen)


WAIT_FOR_GAPS = (in_order,)
"""Policies that always take the lowest slots. While one of these slots is missing, the policy need not be asked."""


def fifo(waiting: Sequence[Waiting], missing: Set[int], want: int) -> tuple[int, ...]:
    """The `want` groups that finished first."""
    if len(waiting) < want:
        return ()
    return tuple(group.id for group in sorted(waiting, key=lambda group: group.pushed)[:want])


def none(rewards: Sequence[float], lengths: Sequence[int]) -> str:
    """Keep all."""
    return ""


NOISE = 1e-6
"""Relative difference of equal rewards."""


def zero_variance(rewards: Sequence[float], lengths: Sequence[int]) -> str:
    """Leave out groups of equal rewards, up to rounding: DAPO's dynamic sampling (arXiv 2503.14476, section 3.2)."""
    least, most = min(rewards), max(rewards)
    return "zero variance" if most - least <= NOISE * max(abs(least), abs(most)) else ""
