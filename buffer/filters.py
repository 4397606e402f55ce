"""Which finished groups are worth training on. Pure functions: (rewards, lengths, *, knobs) → "" to keep, or a reason.

`rewards` and `lengths` (response tokens) have one entry per sample of a group. A filtered group counts under its
reason, and its slot goes to another prompt at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated


def none(rewards: Sequence[float], lengths: Sequence[int]) -> str:
    """Keep all."""
    return ""


def zero_variance(
    rewards: Sequence[float], lengths: Sequence[int], *, tolerance: Annotated[float, "[0, inf)"] = 0.0
) -> str:
    """Leave out groups whose rewards are all equal, up to `tolerance`: their advantages are zero.

    This is dynamic sampling of DAPO (arXiv 2503.14476, section 3.2). DAPO asks 0 < number of correct answers < group
    size; for rewards of 0 and 1 that is the same.
    """
    return "zero variance" if max(rewards) - min(rewards) <= tolerance else ""
