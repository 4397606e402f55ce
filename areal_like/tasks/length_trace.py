"""Lengths of filler: how a small model gets the long-tailed responses of a reasoning model.

The real answer of a small task takes a few tokens. With a trace, each sample decodes that many more tokens after its
answer: really decoded by the engine (they cost time and cache), masked out of the loss and unseen by the verifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

SAMPLES = 32
"""Lengths drawn per prompt; sample i takes number `i % SAMPLES`."""


@dataclass(frozen=True, slots=True)
class LengthTrace:
    """Filler tokens of a sample: `median · exp(sigma · z_prompt) · exp(noise · z_sample)`, z standard normal.

    `sigma` spreads the prompts (hard ones need more tokens), `noise` the samples of one prompt. Rounded to whole tokens
    and clipped to 1..`max`. Raises ValueError where a knob is out of range.
    """

    median: float
    sigma: float = 1.0
    noise: float = 0.3
    max: int = 1000

    def __post_init__(self) -> None:
        if not (self.median > 0 and self.sigma >= 0 and self.noise >= 0 and self.max >= 1):
            raise ValueError(f"length_trace: want median > 0, sigma >= 0, noise >= 0, max >= 1, got {self}")

    def lengths(self, key: int) -> tuple[int, ...]:
        """The lengths [SAMPLES] of the prompt whose 64-bit key this is; the same ones every time."""
        z = np.random.Generator(np.random.Philox(key=key)).standard_normal(1 + SAMPLES)
        # Clipped before exp: float64 ends at exp(709).
        exponents = np.minimum(self.sigma * z[0] + self.noise * z[1:], 600.0)
        tokens = np.rint(self.median * np.exp(exponents))
        return tuple(int(n) for n in np.clip(tokens, 1, self.max))


def trace_of(spec: Mapping[str, Any] | None) -> LengthTrace | None:
    """The trace of a task's `length_trace` knob, e.g. `{median: 60, sigma: 1.0}`. Raises ValueError (unknown knob)."""
    if spec is None:
        return None
    known = [field.name for field in fields(LengthTrace)]
    unknown = sorted(set(spec) - set(known))
    if unknown or "median" not in spec:
        problem = f"unknown knob {unknown[0]!r}" if unknown else "median is missing"
        raise ValueError(f"length_trace: {problem}; the knobs are {', '.join(known)}")
    return LengthTrace(**spec)
