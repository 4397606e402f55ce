"""What chance decides of the samples of training groups: their lengths, and which are right. Drawn for many groups at
once; the numbers are those of each sample's key, so it does not matter who asks for them, nor when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from actors.engines.lengths import AnswerLengths
from areal_like.sampling import longer_keys, stream_key, uniforms

RIGHT = 2
"""Name of the random stream that says which answers are right."""
_BLOCK, _MOST_BLOCKS = 256, 32
"""Groups that are drawn together: they are admitted one after the other. Blocks that are kept."""


class Drawn(NamedTuple):
    """Of each sample of a group: its key, what `AnswerLengths.drawn` takes, and a number below the chance of a right
    answer if it is right. Both are uniform."""

    keys: list[int]
    lengths: list[float]
    right: list[float]


class Dealt(AnswerLengths):
    """Of several traces each prompt, as it comes, gets the next of a shuffled deck. All are used equally often; if each
    drew one, a third would be left out, and a short run be longer or shorter than the one that they are of."""

    def __init__(
        self, median: float, sigma: float, noise: float, seed: int, trace: str | Sequence[int | Sequence[int]] | None
    ):
        super().__init__(median, sigma, noise, seed, trace)
        cards = range(max(1, len(self._traces)))
        self._deck = random.Random(seed).sample(cards, len(cards))
        self._places: dict[int, int] = {}  # of prompts in the deck

    def _place(self, prompt: int) -> int:
        if len(self._deck) == 1:
            return 0
        return self._deck[self._places.setdefault(prompt, len(self._places) % len(self._deck))]


class Draws:
    """`seed`: of the run."""

    def __init__(self, seed: int, lengths: AnswerLengths):
        self._seed, self._lengths = np.array([stream_key(seed)], np.uint64), lengths
        self._block = lru_cache(_MOST_BLOCKS)(self._drawn)

    def of(self, group_id: int, samples: int) -> Drawn:
        """At least so many samples."""
        block, place = divmod(group_id, _BLOCK)
        return self._block(block, samples)[place]

    def _drawn(self, block: int, samples: int) -> list[Drawn]:
        ids = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.uint64)
        keys = longer_keys(longer_keys(self._seed, ids)[:, None], np.arange(samples, dtype=np.uint64))
        right = longer_keys(longer_keys(np.zeros(1, np.uint64), keys.ravel()), np.array([RIGHT], np.uint64))
        chances = uniforms(right, np.zeros(right.size, np.int64)).reshape(keys.shape)
        lengths = self._lengths.draws(keys)
        return [Drawn(keys[n].tolist(), lengths[n].tolist(), chances[n].tolist()) for n in range(_BLOCK)]
