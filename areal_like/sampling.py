"""Sampling keyed by (seed, prompt, sample, position): one uniform number per token, in any order of arrival.

A counter-based generator (splitmix64's finaliser over key + position), so scheduling cannot change the drawn tokens.
Inverse-CDF sampling turns the one number into a token."""

import numpy as np
import xxhash
from numpy.typing import NDArray

from areal_like.weights.digest import mixed

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def stream_key(*parts: int) -> int:
    """A 64-bit key from integers, e.g. `stream_key(seed, group_id, sample_index)`. Order matters."""
    key = 0
    for part in parts:
        key = longer_key(key, part)
    return key


def longer_key(key: int, part: int) -> int:
    """`stream_key(*parts, part)`, from that of `parts`."""
    return _mix((key + _GOLDEN + (part & _MASK)) & _MASK)


def uniform(key: int) -> float:
    """The first number of `uniforms` for a key."""
    return (_mix((key + _GOLDEN) & _MASK) >> 11) * 2.0**-53


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), float64 [n], from keys uint64 [n] and positions int64 [n]."""
    return (mixed(keys, positions + 1) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def digest_of(tokens: np.ndarray) -> int:
    """A 64-bit hash of token ids, int [n]."""
    return xxhash.xxh3_64_intdigest(np.asarray(tokens, np.int32).tobytes())
