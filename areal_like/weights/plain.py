"""The codings of a segment's changes, in NumPy: the reference. `areal_like.weights.kernels` has compiled twins.

A change is a position and a step. Positions are coded as *gaps* (unchanged elements since the change before) or as a
*mask* (a bit per element). A *step* counts the representable numbers from the old value to the new one. Steps: the
bits of a sign-magnitude number are mapped to a whole number that grows with the value, one to one (-0 to -1, +0 to 0;
NaN payloads lie beyond the infinities), the difference is taken mod 2^width, so any two patterns have one, and written
as a *code*: 0 for -1, 1 for +1, 2 for -2, and so on. Most steps of an optimizer are ±1.

A gap takes a byte, a code half of one; those that are too large are escapes, kept in lists of their own.
"""

from __future__ import annotations

import numpy as np

ESCAPE_GAP, ESCAPE_CODE = 255, 15
_PAIR: np.dtype[np.uint16] = np.dtype("<u2")


def steps(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Codes (uint32) of the steps between differing bits (unsigned, of one width)."""
    width = before.itemsize * 8
    top = 1 << (width - 1)
    return codes_of(_ordered(after, top) - _ordered(before, top), width)[0]


def stepped(before: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The bits that `codes` lead to."""
    top = 1 << (before.itemsize * 8 - 1)
    moved = (_ordered(before, top) + distances(codes)) & (2 * top - 1)
    return _ordered(moved, top).astype(before.dtype)


def distances(codes: np.ndarray) -> np.ndarray:
    """The steps themselves, int64."""
    z = codes.astype(np.int64) + 1
    return (z >> 1) ^ -(z & 1)


def codes_of(distances: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes of steps (any integers, mod 2^width) that are not 0, and flags [n] of where those are."""
    top = 1 << (width - 1)
    d = ((distances.astype(np.int64) + top) & (2 * top - 1)) - top
    changed = d != 0
    d = d[changed]
    return (((d << 1) ^ (d >> 63)) - 1).astype(np.uint32), changed


def _ordered(bits: np.ndarray, top: int) -> np.ndarray:
    """Its own inverse; int64 in [0, 2 · top), to be read mod 2 · top."""
    wide = bits.astype(np.int64)
    return np.where(wide & top, wide ^ (top - 1), wide)


def encode_gaps(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places (ascending, int64) → gaps uint8 [n] and far uint32: what the escapes among them lack."""
    gaps = np.diff(places, prepend=-1) - 1
    return np.minimum(gaps, ESCAPE_GAP).astype(np.uint8), (gaps[gaps >= ESCAPE_GAP] - ESCAPE_GAP).astype(np.uint32)


def decode_gaps(gaps: np.ndarray, far: np.ndarray) -> np.ndarray:
    """Places, int64."""
    wide = gaps.astype(np.int64) + 1
    wide[gaps == ESCAPE_GAP] += far
    return np.cumsum(wide) - 1


def encode_codes(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes → short ones uint8 [n] (0 to 15) and big uint32: the escapes among them, whole."""
    return np.minimum(codes, ESCAPE_CODE).astype(np.uint8), codes[codes >= ESCAPE_CODE].astype(np.uint32)


def decode_codes(short: np.ndarray, big: np.ndarray) -> np.ndarray:
    codes = short.astype(np.uint32)
    codes[short == ESCAPE_CODE] = big
    return codes


def encode_mask(places: np.ndarray, count: int) -> np.ndarray:
    """uint64 [count / 64, rounded up]: bit j of word i is element 64 i + j."""
    flags = np.zeros(-(-count // 64) * 64, np.uint8)
    flags[places] = 1
    return np.packbits(flags, bitorder="little").view(np.uint64)


def decode_mask(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def pack_codes(short: np.ndarray) -> np.ndarray:
    """Two to a byte, the first in the low half."""
    even = np.ascontiguousarray(short if short.size % 2 == 0 else np.append(short, np.uint8(0)))
    pairs = even.view(_PAIR)  # whole arrays at a time: far faster than every other element
    return (pairs | pairs >> 4).astype(np.uint8)


def unpack_codes(packed: np.ndarray, count: int) -> np.ndarray:
    pairs = packed.astype(_PAIR)
    return ((pairs | pairs << 4) & 0x0F0F).astype(_PAIR).view(np.uint8)[:count]
