"""The digest of a state's bits; an update costs time by the number of changes only.

The buffer is a sequence of 64-bit words w_i. Each is mixed with its position, x_i = mix(w_i + i · K) (the finaliser of
SplitMix64), and two sums mod 2^64 are kept, the *lanes*: Σ x_i and Σ low32(x_i) · high32(x_i). So a changed word costs
two mixes, and the lanes of parts add up to those of the whole.

It detects accidents: `mix` is a bijection, so the first lane detects *every* change of a single word; others go
undetected with chance 2^-128. It is no defence against forged weights: keys decide who may publish (`wire.keys`)."""

import importlib
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

K, A, B = (np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
COMPILED_FROM = 1 << 20
"""Bytes of weights from which compiled kernels are used: loading numba takes half a second."""
_STRIDE = 1 << 14
"""Words that NumPy takes at once: its temporaries stay in the cache."""

Lanes = NDArray[np.uint64]
"""[2]."""


def text_of(lanes: Lanes, size: int) -> str:
    """Lanes of all words as text, 32 hexadecimal digits; the number of words is mixed in."""
    first, second = (int(lane) for lane in lanes + mixed(np.array([size], np.uint64), 0))
    return f"{first:016x}{second:016x}"


def lanes_of(words: np.ndarray, first: int) -> Lanes:
    """The lanes of words (uint64 [n]); the first word stands at position `first`."""
    fast = kernels_for(words.nbytes)
    return fast.sweep(words, first) if fast else sweep(words, first)


def sweep(words: np.ndarray, first: int) -> Lanes:
    """`lanes_of` in NumPy, the reference of the compiled twin."""
    lanes = np.zeros(2, np.uint64)
    for start in range(0, words.size, _STRIDE):
        part = words[start : start + _STRIDE]
        lanes += _sums(part, np.arange(first + start, first + start + part.size, dtype=np.uint64))
    return lanes


def lanes_at(words: np.ndarray, places: np.ndarray, first: int) -> Lanes:
    """The lanes of the words at `places` (each once) alone."""
    return _sums(words[places], (places + first).astype(np.uint64))


def _sums(words: NDArray[np.uint64], positions: NDArray[np.uint64]) -> Lanes:
    x = mixed(words, positions)
    return np.array([x.sum(dtype=np.uint64), ((x & LOW) * (x >> HALF)).sum(dtype=np.uint64)])


def mixed(words: NDArray[np.uint64], positions: NDArray[np.int64 | np.uint64] | int) -> NDArray[np.uint64]:
    x = words + np.asarray(positions, np.uint64) * K
    x ^= x >> np.uint64(30)
    x *= A
    x ^= x >> np.uint64(27)
    x *= B
    x ^= x >> np.uint64(31)
    return x


def kernels_for(nbytes: int) -> ModuleType | None:
    """`areal_like.weights.kernels` if it pays for this number of bytes; None: use NumPy."""
    return importlib.import_module("areal_like.weights.kernels") if nbytes >= COMPILED_FROM else None
