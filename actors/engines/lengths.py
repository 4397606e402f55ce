"""How long made-up answers are: a function of prompt and sampling key, so that a run can be repeated."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from areal_like.sampling import longer_key, longer_keys, stream_key, uniform, uniforms

_NORMAL = NormalDist()


class AnswerLengths:
    """A prompt's median length is log-normal(`median`, `sigma`), a sample's length log-normal(its prompt's median,
    `noise`), in tokens. `trace`: lengths to draw from instead: a list, or a file (a JSON list, or numbers separated by
    white space or commas, such as a csv of one column with or without its name). A list of lists has those of several
    prompts: a prompt draws one of them, its samples from that one, each another where a group is drawn at once. Raises
    ValueError."""

    def __init__(
        self,
        median: float,
        sigma: float,
        noise: float,
        seed: int = 0,
        trace: str | Sequence[int | Sequence[int]] | None = None,
    ):
        self._median, self._sigma, self._noise, self._key = median, sigma, noise, stream_key(seed)
        given = _read_trace(trace) if isinstance(trace, str) else list(trace or ())
        lists = [each for each in given if not isinstance(each, int)]
        if lists and (len(lists) < len(given) or not all(lists)):
            raise ValueError("trace: either lengths, or lists of lengths")
        self._traces = lists or ([[each for each in given if isinstance(each, int)]] if given else [])
        if any(min(each) < 1 for each in self._traces):
            raise ValueError("trace: every length must be at least 1")

    def of(self, prompt: int, key: int) -> int:
        """The whole length of the sample with this key: at least 1. `prompt`: `digest_of` its prompt."""
        return self.drawn(prompt, [uniform(longer_key(self._key, key))])[0]

    def draws(self, keys: NDArray[np.uint64]) -> NDArray[np.float64]:
        """What `drawn` takes, for the samples with these keys."""
        samples = longer_keys(np.array([self._key], np.uint64), keys.ravel())
        return uniforms(samples, np.zeros(keys.size, np.int64)).reshape(keys.shape)

    def drawn(self, prompt: int, draws: Iterable[float]) -> list[int]:
        """The whole lengths of the first samples of a group, by their own uniform numbers (`draws`). Of several traces
        the first number says where in the prompt's trace the group begins."""
        if self._traces:
            trace, given = self._traces[self._place(prompt)], list(draws)
            if len(self._traces) == 1 or len(given) == 1:
                return [trace[int(draw * len(trace))] for draw in given]
            first = int(given[0] * len(trace))  # each has another one, or the longest would be missing too often
            return [trace[(first + place) % len(trace)] for place in range(len(given))]
        spread = self._sigma * _spread(longer_key(self._key, prompt)) if self._sigma else 0.0
        if not self._noise:
            return [max(1, round(self._median * math.exp(spread))) for _ in draws]
        median, noise, normal, exp = self._median, self._noise, _NORMAL.inv_cdf, math.exp
        return [max(1, round(median * exp(spread + noise * normal(max(draw, 2.0**-53))))) for draw in draws]

    def _place(self, prompt: int) -> int:
        """Of the prompt's trace."""
        count = len(self._traces)
        return int(uniform(longer_key(self._key, prompt)) * count) if count > 1 else 0


@lru_cache(4096)
def _spread(key: int) -> float:
    """That of a prompt, which has many samples."""
    return _NORMAL.inv_cdf(max(uniform(key), 2.0**-53))


def _read_trace(path: str) -> list[int | Sequence[int]]:
    text = Path(path).read_text(encoding="utf-8-sig").strip()
    if text.startswith("["):
        numbers = json.loads(text)
    else:
        name, _, rest = text.partition("\n")
        numbers = (rest if any(map(str.isalpha, name)) else text).replace(",", " ").split()
    try:
        lengths: list[int | Sequence[int]] = [list(map(int, n)) if isinstance(n, list) else int(n) for n in numbers]
    except (TypeError, ValueError) as error:
        raise ValueError(f"trace: {path!r} has something else than lengths ({error})") from None
    if not lengths:
        raise ValueError(f"trace: no lengths in {path!r}")
    return lengths
