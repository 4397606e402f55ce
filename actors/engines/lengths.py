"""Lengths of made-up answers: a function of prompt and sampling key, so that a run can be repeated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

from areal_like.sampling import longer_key, stream_key, uniform

_NORMAL = NormalDist()


class AnswerLengths:
    """A prompt's median length is log-normal(`median`, `sigma`), a sample's length log-normal(its prompt's median,
    `noise`), in tokens. `trace`: lengths to draw from instead: a prompt draws one of the lists, its samples from that
    list. Raises ValueError."""

    def __init__(
        self, median: float, sigma: float, noise: float, seed: int = 0, trace: Sequence[Sequence[int]] | None = None
    ):
        self._median, self._sigma, self._noise, self._key = median, sigma, noise, stream_key(seed)
        self._trace = trace or []
        if not all(each and min(each) >= 1 for each in self._trace):
            raise ValueError("trace: got an empty list or a length below 1, expected lists of lengths of at least 1")

    def of(self, prompt: int, key: int) -> int:
        """Whole length of the sample with this key: at least 1. `prompt`: `digest_of` its prompt."""
        draw = uniform(longer_key(self._key, key))
        if self._trace:
            lengths = self._trace[int(uniform(longer_key(self._key, prompt)) * len(self._trace))]
            return lengths[int(draw * len(lengths))]
        spread = self._sigma * _normal(longer_key(self._key, prompt)) if self._sigma else 0.0
        if self._noise:
            spread += self._noise * _NORMAL.inv_cdf(max(draw, 2.0**-53))
        return max(1, round(self._median * math.exp(spread)))


@lru_cache(4096)
def _normal(key: int) -> float:
    """Standard normal number of a prompt, which has many samples."""
    return _NORMAL.inv_cdf(max(uniform(key), 2.0**-53))
