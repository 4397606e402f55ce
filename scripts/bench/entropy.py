"""A lower bound for the bytes of a lossless delta, to compare the codec with."""

from __future__ import annotations

import numpy as np

from areal_like.weights import plain
from areal_like.weights.state import State


def entropy_bits(share: float) -> float:
    """Of a coin that shows heads with probability `share`."""
    if share <= 0.0 or share >= 1.0:
        return 0.0
    return float(-share * np.log2(share) - (1 - share) * np.log2(1 - share))


def bound_bytes(before: State, after: State) -> float:
    """Entropy of the places, each as likely as any other of its tensor, and of the steps' own distribution in it.

    A bound for codings that treat elements alike, whatever their neighbours and values; one that models where changes
    recur could take less.
    """
    bits = 0.0
    for (spec, old), (_, new) in zip(before.tensors(), after.tensors(), strict=True):
        places = np.flatnonzero(old != new)
        if places.size:
            _, counts = np.unique(plain.steps(old[places], new[places]), return_counts=True)
            shares = counts / places.size
            bits += spec.count * entropy_bits(places.size / spec.count)
            bits -= places.size * float((shares * np.log2(shares)).sum())
    return bits / 8
