"""The codings of a segment's changes, in NumPy: the reference of the compiled twins in `areal_like.weights.kernels`.

A change is a position and a step. Positions are coded as *gaps* (unchanged elements since the change before) or as a
*mask* (a bit per element). A *step* counts the representable numbers from the old value to the new one: the bits of a
sign-magnitude number are mapped to a whole number that grows with the value, one to one (-0 to -1, +0 to 0; NaN
payloads lie beyond the infinities), the difference is taken mod 2^width, and written as a *code*: 0 for -1, 1 for +1, 2
for -2, and so on. A gap takes a byte, a code half of one; larger ones are escapes, in lists of their own."""

import numpy as np

from areal_like.weights.digest import lanes_at

ESCAPE_GAP, ESCAPE_CODE = 255, 15
_PAIR: np.dtype[np.uint16] = np.dtype("<u2")


def steps(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Codes (uint32) of the steps between differing bits (unsigned, of one width)."""
    top = 1 << (before.itemsize * 8 - 1)
    d = ((_ordered(after, top) - _ordered(before, top) + top) & (2 * top - 1)) - top
    codes: np.ndarray = (((d << 1) ^ (d >> 63)) - 1).astype(np.uint32)
    return codes


def stepped(before: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The bits that `codes` lead to."""
    top, z = 1 << (before.itemsize * 8 - 1), codes.astype(np.int64) + 1
    moved = (_ordered(before, top) + ((z >> 1) ^ -(z & 1))) & (2 * top - 1)
    return _ordered(moved, top).astype(before.dtype)


def _ordered(bits: np.ndarray, top: int) -> np.ndarray:
    """Its own inverse; int64 in [0, 2 · top), to be read mod 2 · top."""
    wide = bits.astype(np.int64)
    return np.where(wide & top, wide ^ (top - 1), wide)


def pack_codes(short: np.ndarray) -> np.ndarray:
    """Two to a byte, the first in the low half."""
    even = np.ascontiguousarray(short if short.size % 2 == 0 else np.append(short, np.uint8(0)))
    pairs = even.view(_PAIR)  # whole arrays at a time: far faster than every other element
    return (pairs | pairs >> 4).astype(np.uint8)


def unpack_codes(packed: np.ndarray, count: int) -> np.ndarray:
    pairs = packed.astype(_PAIR)
    return ((pairs | pairs << 4) & 0x0F0F).astype(_PAIR).view(np.uint8)[:count]


def places_of(gaps: np.ndarray, far: np.ndarray) -> np.ndarray:
    """Gaps uint8 [n] and far uint32 (the excess of the escapes among them) → places, int64."""
    wide = gaps.astype(np.int64) + 1
    wide[gaps == ESCAPE_GAP] += far
    return np.cumsum(wide) - 1


def _put_codes(codes: np.ndarray, short: np.ndarray, big: np.ndarray, fill: np.ndarray) -> None:
    """Append codes: short ones (0 to 15), and the escapes among them whole."""
    escapes = codes[codes >= ESCAPE_CODE]
    short[fill[2] : fill[2] + codes.size] = np.minimum(codes, ESCAPE_CODE)
    big[fill[3] : fill[3] + escapes.size] = escapes
    fill[2:] += codes.size, escapes.size


def _step_at(bits: np.ndarray, places: np.ndarray, short: np.ndarray, big: np.ndarray) -> None:
    codes = short.astype(np.uint32)
    codes[short == ESCAPE_CODE] = big
    bits[places] = stepped(bits[places], codes)


def encode_gaps(  # noqa: PLR0913
    old: np.ndarray, new: np.ndarray, old_words: np.ndarray, new_words: np.ndarray, first: int, limit: int,
    gaps: np.ndarray, far: np.ndarray, codes: np.ndarray, big: np.ndarray, fill: np.ndarray, lanes: np.ndarray,
) -> int:  # fmt: skip
    """Append the changes to gaps, far, codes and big, of which `fill` int64 [4] entries are used, and add the change of
    the lanes of words from `first` on (-1: not kept). Returns their number; -1, and appends nothing, if above
    `limit`."""
    places = np.flatnonzero(old != new)
    if places.size > limit:
        return -1
    found = np.diff(places, prepend=-1) - 1
    escapes = found[found >= ESCAPE_GAP] - ESCAPE_GAP
    gaps[fill[0] : fill[0] + found.size] = np.minimum(found, ESCAPE_GAP)
    far[fill[1] : fill[1] + escapes.size] = escapes
    fill[:2] += found.size, escapes.size
    _put_codes(steps(old[places], new[places]), codes, big, fill)
    if first >= 0:
        at = _words_of(places, old.itemsize)
        lanes += lanes_at(new_words, at, first) - lanes_at(old_words, at, first)
    return places.size


def encode_mask(
    old: np.ndarray, new: np.ndarray, mask: np.ndarray, codes: np.ndarray, big: np.ndarray, fill: np.ndarray
) -> int:
    """Append to codes and big, as above; `mask` uint64: bit j of word i is element 64 i + j."""
    changed = np.zeros(64 * mask.size, bool)
    np.not_equal(old, new, out=changed[: old.size])
    places = np.flatnonzero(changed)
    mask[:] = np.packbits(changed, bitorder="little").view(np.uint64)
    _put_codes(steps(old[places], new[places]), codes, big, fill)
    return places.size


def apply_gaps(
    bits: np.ndarray, words: np.ndarray, first: int, gaps: np.ndarray, far: np.ndarray, codes: np.ndarray,
    big: np.ndarray, lanes: np.ndarray,
) -> None:  # fmt: skip
    """Step the elements that the gaps lead to; `words` are those of the bits, `first` and `lanes` as above."""
    places = places_of(gaps, far)
    at = _words_of(places, bits.itemsize)
    before = lanes_at(words, at, first) if first >= 0 else 0
    _step_at(bits, places, codes, big)
    if first >= 0:
        lanes += lanes_at(words, at, first) - before


def apply_mask(bits: np.ndarray, mask: np.ndarray, codes: np.ndarray, big: np.ndarray) -> None:
    _step_at(bits, np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")), codes, big)


def _words_of(places: np.ndarray, itemsize: int) -> np.ndarray:
    """The words in which elements at ascending places lie, each once."""
    at = places * itemsize >> 3
    return at[np.diff(at, prepend=-1) > 0]
