"""The engine's experts for a batch's tokens, flat. Micro-batches select those of their rows (router replay)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_like.types import Sample

UNKNOWN = -1
"""Stands for the experts of a position where they are not known."""


@dataclass(frozen=True, slots=True)
class EngineExperts:
    """`place` int64 [tokens] is where a token's experts stand in `known` [positions, layers, k]; UNKNOWN: nowhere."""

    known: np.ndarray
    place: np.ndarray

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> EngineExperts | None:
        """None if no sample has experts. Positions after a sample's known ones are UNKNOWN. Raises ValueError if they
        misfit."""
        known = [sample.experts for sample in samples if sample.experts is not None]
        if not known:
            return None
        if len({each.shape[1:] for each in known}) > 1:
            raise ValueError(f"samples have experts of different shapes: {sorted({each.shape[1:] for each in known})}")
        if wrong := [s for s in samples if s.experts is not None and len(s.experts) >= len(s.tokens)]:
            raise ValueError(f"a sample of {len(wrong[0].tokens)} tokens has experts of another number of positions")
        place = np.full(sum(len(sample.tokens) for sample in samples), UNKNOWN, np.int64)
        token = position = 0
        for sample in samples:
            count = 0 if sample.experts is None else len(sample.experts)
            place[token : token + count] = np.arange(position, position + count)
            token, position = token + len(sample.tokens), position + count
        return cls(np.concatenate(known), place)

    def at(self, tokens: np.ndarray) -> np.ndarray:
        """The experts of some tokens (int64 [S]): int16 [S, layers, k], UNKNOWN where they are not known."""
        place = self.place[tokens]
        found = self.known[np.maximum(place, 0)].astype(np.int16)
        found[place == UNKNOWN] = UNKNOWN
        return found

    def labels(self, tokens: np.ndarray) -> np.ndarray:
        """A label per token, int64 from 0 on: equal if both tokens (int64 [n], not negative) and experts are equal."""
        rows = np.ascontiguousarray(self.known.reshape(len(self.known), -1))
        kinds = np.unique(rows.view(np.dtype((np.void, rows[:1].nbytes)))[:, 0], return_inverse=True)[1]
        kind = np.where(self.place == UNKNOWN, 0, kinds[np.maximum(self.place, 0)] + 1)
        return np.unique(tokens * (len(kinds) + 1) + kind, return_inverse=True)[1]
