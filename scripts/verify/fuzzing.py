"""Runs generated inputs one by one, and checks the outcome of each: see `scripts.verify.fuzz`."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

ALLOWED_BYTES, ALLOWED_FACTOR, ALLOWED_SECONDS = 4 << 20, 100, 1.0
"""Limits; seconds of processor time. An empty map in a list takes 72 bytes in memory for one byte on the wire."""
Frames = list[bytes]
Make = Callable[[int, int], tuple[str, Frames]]


class Finding(AssertionError):
    """An input that was neither accepted nor refused."""


def run(
    inputs: int, seed: int, first: int, tell: Callable[[int], None], make: Make, take: Callable[[Frames], str]
) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    most_bytes = most_seconds = 0.0
    tracemalloc.start()
    try:
        for number in range(first, first + inputs):
            kind, frames = make(seed, number)
            size = sum(map(len, frames))
            tracemalloc.reset_peak()
            before, began = tracemalloc.get_traced_memory()[0], time.process_time()
            try:
                outcome = take(frames)
            except Exception as error:
                raise Finding(f"input {number} of seed {seed} ({kind}): {type(error).__name__}: {error}") from error
            seconds = time.process_time() - began
            used = tracemalloc.get_traced_memory()[1] - before
            if used > ALLOWED_BYTES + ALLOWED_FACTOR * size or seconds > ALLOWED_SECONDS:
                raise Finding(f"input {number} of seed {seed} ({kind}): {used} bytes, {seconds:.2f} s for {size} bytes")
            outcomes["refused" if outcome == "refused" else "accepted"] += 1
            outcomes[f"made: {kind}"] += 1
            most_bytes, most_seconds = max(most_bytes, used), max(most_seconds, seconds)
            if number % 10_000 == 9_999:
                tell(number + 1 - first)
    finally:
        tracemalloc.stop()
    return {**outcomes, "inputs": inputs, "most_bytes": int(most_bytes), "most_seconds": most_seconds}
