"""Ranges of numbers, written as intervals: "[0, 1)" is at least 0 and below 1, "(0, inf)" above 0 and finite.

A knob states its range in its annotation (`clip: Annotated[float, "(0, 1]"]`), a key of the config in a table. No
interval contains nan; one that ends with "inf]" contains infinity.
"""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

_SECONDS = 10_000_000
"""More than that, clocks and sockets do not take: 115 days."""

RANGES = {
    "run.seed": f"[0, {2**64 - 1}]",
    "run.steps": "[0, inf)",
    "run.max_seconds": "[0, inf]",
    "run.target_reward": "[-inf, inf]",
    "groups_per_batch": "[1, inf)",
    "weight_sync_interval": "[1, inf)",
    "sampling.temperature": "[0, inf)",
    "sampling.max_new_tokens": "[1, inf)",
    "eval.every": "[0, inf)",
    "eval.prompts": "[0, inf)",
    "eval.samples": "[1, inf)",
    "eval.temperature": "[0, inf)",
    "eval.right": "[-inf, inf]",
    "actors.count": "[1, inf)",
    "run.max_untrainable": "[1, inf)",
    "run.max_nonfinite": "[1, inf)",
    "run.samples_bytes": "[0, inf)",
    "actors.max_restarts": "[0, inf)",
    "actors.restart_window": "[0, inf]",
    "actors.min_alive": "[1, inf)",
    "actors.threads": "[1, inf)",
    "learner.threads": "[1, inf)",
    "learner.ranks": "[1, inf)",
    "rewards.workers": "[0, inf)",
    "rewards.timeout": f"[0.01, {_SECONDS}]",
    "rewards.min_timeout": f"[0.01, {_SECONDS}]",
    "rewards.slack": "[1, inf)",
    "rewards.max_timeouts": "(0, 1]",
    "rewards.memory_limit": f"[{1 << 26}, inf)",
    "buffer.port": "[0, 65535]",
    "buffer.max_bytes": "[1, inf)",
    "buffer.heartbeat_timeout": f"[2, {_SECONDS}]",
    "buffer.lease_timeout": f"[0, {_SECONDS}]",
    "weights.dense_above": "[0, 1]",
    "weights.block_bytes": "[4096, inf)",
    "weights.keep": "[1, inf)",
    "weights.snapshot_every": "[1, inf)",
    "weights.sweep_every": "[1, inf)",
    "weights.probe_every": "[0, inf)",
    "weights.probe_error": "(0, inf]",
    "weights.fanout": "[0, inf)",
    "checkpoint.every": "[0, inf)",
    "checkpoint.keep": "[1, inf)",
}
"""Key → the interval that its number lies in. Components state the ranges of their knobs themselves (`Annotated`);
here are those that the processes read of any component."""

_INTERVAL = re.compile(r"([\[(])\s*([^,\s]+)\s*,\s*([^,\s]+)\s*([\])])")


class Range(NamedTuple):
    low: float
    high: float
    with_low: bool
    with_high: bool

    def contains(self, value: float) -> bool:
        above = value >= self.low if self.with_low else value > self.low
        return above and (value <= self.high if self.with_high else value < self.high)

    def misfit(self, value: float) -> str:
        """Why the value is outside, such as "must be at least 0 and below 1"; empty where it is inside."""
        if self.contains(value):
            return ""
        if value != value:
            return "must be a number"
        ends = [f"{'at least' if self.with_low else 'above'} {self.low}"] if self.low > -math.inf else []
        if self.high < math.inf:
            ends.append(f"{'at most' if self.with_high else 'below'} {self.high}")
        elif value == math.inf:
            ends.append("finite")
        return f"must be {' and '.join(ends)}"


@functools.cache
def range_of(text: str) -> Range | None:
    """The range that an interval writes; None for a text that is no interval."""
    found = _INTERVAL.fullmatch(text)
    if not found:
        return None
    opening, low, high, closing = found.groups()
    return Range(_number(low), _number(high), opening == "[", closing == "]")


def _number(text: str) -> float:
    """Whole numbers stay whole: 64 bits are more than a float holds."""
    try:
        return int(text)
    except ValueError:
        return float(text)
