"""Shared prefixes: finds equal tokens in equal contexts of a batch, so that a model computes them once.

Sorted by their tokens, sequences with a common prefix are neighbours; a sequence shares its longest prefix with the
neighbour before it. So a list of sequences is a tree: each sequence adds the tokens behind its shared prefix. A causal
model's state at a token depends only on that token and those before it, so it is computed once for all sequences that
share it, and its gradient is the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WORTH = 0.95
"""Share prefixes where at most this share of the tokens is left: attention over a tree has more bookkeeping."""


def is_worth(total: int, unique: int, micro_batch_tokens: float) -> bool:
    """Whether sequences of `total` tokens, `unique` without repetitions, share them: also if they fit only then."""
    return unique <= WORTH * total or unique < total > micro_batch_tokens


@dataclass(frozen=True, slots=True)
class Forest:
    """Sequences in the order of their tokens: `order` int64 [m] are their numbers; `place` int64 [n] is where a number
    stands in it (−1: nowhere); `shared` int64 [m] counts the tokens that each has in common with the one before it."""

    order: np.ndarray
    place: np.ndarray
    shared: np.ndarray

    @classmethod
    def of(cls, tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> Forest:
        """Of non-empty sequences `tokens[starts[i] : starts[i] + lengths[i]]` (int64, tokens below 2³²)."""
        numbers = np.flatnonzero(lengths)
        ordered = tokens.astype(">u4")  # whose bytes sort as the numbers do
        keys = {i: ordered[starts[i] : starts[i] + lengths[i]].tobytes() for i in numbers.tolist()}
        order = np.array(sorted(keys, key=keys.__getitem__), np.int64)
        shared = np.zeros(len(order), np.int64)
        for at in range(1, len(order)):
            before, here = order[at - 1], order[at]
            both = min(lengths[before], lengths[here])
            differ = (
                tokens[starts[before] : starts[before] + both] != tokens[starts[here] : starts[here] + both]
            ).nonzero()[0]
            shared[at] = differ[0] if len(differ) else both
        place = np.full(len(lengths), -1, np.int64)
        place[order] = np.arange(len(order))
        return cls(order, place, shared)

    def among(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Some of the sequences (int64 [k]) in the forest's order, as indices into `numbers`, and how many tokens each
        shares with the one before it in that order."""
        order = np.argsort(self.place[numbers], kind="stable")
        places = self.place[numbers][order]
        shared = np.zeros(len(places), np.int64)
        for at in range(1, len(places)):  # with an earlier one it shares the prefix that all between them have, too
            between = self.shared[places[at - 1] + 1 : places[at] + 1]
            shared[at] = between[0] if len(between) == 1 else between.min()
        return order, shared


def cut(lengths: Sequence[int], shared: Sequence[int], most: int) -> list[list[int]]:
    """Sequences in a forest's order, cut into runs of at most `most` tokens, shared ones once; longer ones alone."""
    runs: list[list[int]] = []
    held = 0
    for number, (length, common) in enumerate(zip(lengths, shared, strict=True)):
        added = length - common
        if not runs or held + added > most:
            runs.append([])
            held, added = 0, length
        runs[-1].append(number)
        held += added
    return runs


def paths(lengths: np.ndarray, shared: np.ndarray) -> list[np.ndarray]:
    """Where the tokens of each sequence lie in a row that holds each token of the tree once: the new tokens of the
    first sequence, of the second, …: per sequence int64 [length]."""
    found: list[np.ndarray] = []
    start = 0
    for length, common in zip(lengths.tolist(), shared.tolist(), strict=True):
        own = np.arange(start, start + length - common)
        found.append(np.concatenate([found[-1][:common], own]) if common else own)
        start += length - common
    return found
