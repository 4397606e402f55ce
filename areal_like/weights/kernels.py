"""Compiled twins of slow NumPy code: compare and code in one pass, apply, sweep for the digest.

The twins in NumPy (`areal_like.weights.plain`, `digest.sweep`) give the same numbers. Compiled at first use and kept by
this file or in numba's folder of the user. No kernel checks bounds: `weights.delta` has validated their arrays.

Why it is fast: it compares 64 elements at once, collects the positions of changes per tile that fits the nearest cache,
so the loops over changes have no unpredictable branch, and prefetches beyond pages of 4 KB."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.base import BaseContext
from numba.core.typing import BaseContext as TypingContext
from numba.core.typing import Signature
from numba.extending import intrinsic

from areal_like.weights.digest import LOW, A, B, K
from areal_like.weights.plain import ESCAPE_CODE, ESCAPE_GAP

_AHEAD = 512
"""Bytes to prefetch."""
_TILE = 4096
"""Elements per tile: compared, or applied, in one pass."""
_ONE = np.uint64(1)

Array = np.ndarray
F = TypeVar("F", bound=Callable[..., object])
Intrinsic = tuple[Signature, Callable[[BaseContext, ir.IRBuilder, Signature, list[ir.Value]], ir.Value]]
_intrinsic: Callable[[Callable[..., Intrinsic]], Callable[..., np.uint64]] = intrinsic


def compiled(function: F, **options: object) -> F:
    """Compile at the first call. The kernels run without the interpreter's lock."""
    try:
        return njit(nogil=True, cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # nowhere to keep it
        return njit(nogil=True, **options)(function)  # type: ignore[no-any-return]


def _prefetch(builder: ir.IRBuilder, place: ir.Value, ahead: int, write: bool) -> None:
    """Fetch the line of the cache `ahead` bytes beyond a place."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    there = builder.gep(builder.bitcast(place, byte), [ir.Constant(ir.IntType(64), ahead)])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
    builder.call(prefetch, [there, number(int(write)), number(3), number(1)])


@_intrinsic
def _differ(typingctx: TypingContext, old: types.Array, new: types.Array, at: types.Integer) -> Intrinsic:
    """Bit j of the uint64: do elements at + j differ? Fetches ahead."""

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: list[ir.Value]) -> ir.Value:
        width = signature.args[0].dtype.bitwidth
        vector = ir.VectorType(ir.IntType(width), 64)
        loaded = []
        for each, array in zip(signature.args, args[:2], strict=False):
            place = builder.gep(context.make_array(each)(context, builder, array).data, [args[2]])
            for line in range(width // 8):
                _prefetch(builder, place, _AHEAD + 64 * line, False)
            loaded.append(builder.load(builder.bitcast(place, vector.as_pointer()), align=width // 8))
        return builder.bitcast(builder.icmp_unsigned("!=", *loaded), ir.IntType(64))

    return types.uint64(old, new, types.intp), codegen


@_intrinsic
def _will_write(typingctx: TypingContext, array: types.Array, at: types.Integer) -> Intrinsic:
    """Fetch the place of an element that is going to be written."""

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: list[ir.Value]) -> ir.Value:
        place = builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])
        _prefetch(builder, place, 0, True)
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@_intrinsic
def _lowest(typingctx: TypingContext, bits: types.Integer) -> Intrinsic:
    """The number of the lowest bit that is set; of 0, undefined."""

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: list[ir.Value]) -> ir.Value:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), codegen


@compiled
def _changes(old: Array, new: Array, at: int) -> np.uint64:
    """Like `_differ`, also where fewer than 64 elements are left."""
    if at + 64 <= old.size:
        return _differ(old, new, at)
    bits = np.uint64(0)
    for j in range(old.size - at):
        if old[at + j] != new[at + j]:
            bits |= _ONE << np.uint64(j)
    return bits


@compiled
def _mixed(x: np.uint64) -> np.uint64:
    """As `digest.mixed`, of a word that its position times K was added to."""
    x ^= x >> np.uint64(30)
    x *= A
    x ^= x >> np.uint64(27)
    x *= B
    return x ^ (x >> np.uint64(31))


@compiled
def _count(words: Array, first: int, width: int, places: Array, n: int, sign: int, lanes: Array) -> None:
    """Add the words in which `n` elements lie (subtract them, with sign -1) to the lanes, each once."""
    one, two, last = np.uint64(0), np.uint64(0), np.int64(-1)
    shift = np.int64(3 - (width >> 4))  # elements per word: 8, 4, 2
    for k in range(n):
        at = places[k] >> shift
        if at != last:
            last = at
            x = _mixed(words[at] + np.uint64(first + at) * K)
            one += x
            two += (x & LOW) * (x >> np.uint64(32))
    factor = np.uint64(sign)
    lanes[0] += factor * one
    lanes[1] += factor * two


@compiled
def sweep(words: Array, first: int) -> Array:
    one, two = np.uint64(0), np.uint64(0)
    offset = np.uint64(first) * K
    for i in range(words.size):
        x = _mixed(words[i] + offset)
        offset += K  # adding up lets the compiler use vectors
        one += x
        two += (x & LOW) * (x >> np.uint64(32))
    lanes = np.empty(2, np.uint64)
    lanes[0], lanes[1] = one, two
    return lanes


@compiled
def _ordered(bits: np.int64, top: np.int64) -> np.int64:
    """As `plain._ordered`, without a branch; `top` is 1 << (width - 1)."""
    return bits ^ ((top - 1) & -np.int64(bits >= top))


@compiled
def _step(before: np.unsignedinteger, after: np.unsignedinteger, width: int) -> np.int64:
    """Bits before and after → the step between them, as a code ≥ 0 (see `plain.steps`)."""
    top = np.int64(1) << (width - 1)
    d = ((_ordered(np.int64(after), top) - _ordered(np.int64(before), top) + top) & (2 * top - 1)) - top
    return ((d << 1) ^ (d >> 63)) - 1


@compiled
def _stepped(before: np.unsignedinteger, code: np.int64, width: int) -> np.int64:
    top, z = np.int64(1) << (width - 1), np.int64(code) + 1
    return _ordered((_ordered(np.int64(before), top) + ((z >> 1) ^ -(z & 1))) & (2 * top - 1), top)


@compiled
def _places(old: Array, new: Array, at: int, words: Array, starts: Array, places: Array) -> int:
    """Write where elements of the tile at `at` differ to `places`; returns how many. Others: scratch."""
    stop, n, k = min(old.size, at + _TILE), 0, 0
    for each in range(at, stop, 64):
        bits = _changes(old, new, each)
        words[n], starts[n] = bits, each
        n += bits != 0
    for j in range(n):
        bits, start = words[j], starts[j]
        while bits:
            places[k] = start + np.int64(_lowest(bits))
            bits &= bits - _ONE
            k += 1
    return k


@compiled
def encode_gaps(  # noqa: PLR0913
    old: Array, new: Array, old_words: Array, new_words: Array, first: int, limit: int,
    gaps: Array, far: Array, codes: Array, big: Array, fill: Array, lanes: Array,
) -> int:  # fmt: skip
    """As `plain.encode_gaps`; each array needs room for a tile more than `limit`."""
    width, before = old.itemsize * 8, np.int64(-1)
    k, f, c, b = fill[0], fill[1], fill[2], fill[3]
    words, starts = np.empty(_TILE // 64, np.uint64), np.empty(_TILE // 64, np.int64)
    places = np.empty(_TILE, np.int64)
    sums = np.zeros(2, np.uint64)
    for at in range(0, old.size, _TILE):
        n = _places(old, new, at, words, starts, places)
        for j in range(n):
            gap = places[j] - before - 1
            before = places[j]
            gaps[k + j] = min(gap, ESCAPE_GAP)
            far[f] = gap - ESCAPE_GAP
            f += gap >= ESCAPE_GAP
        for j in range(n):
            code = _step(old[places[j]], new[places[j]], width)
            codes[c + j] = min(code, ESCAPE_CODE)
            big[b] = code
            b += code >= ESCAPE_CODE
        k, c = k + n, c + n
        if first >= 0:
            _count(new_words, first, width, places, n, 1, sums)
            _count(old_words, first, width, places, n, -1, sums)
        if k - fill[0] > limit:
            return -1
    changes: int = k - fill[0]
    fill[0], fill[1], fill[2], fill[3] = k, f, c, b
    lanes += sums
    return changes


@compiled
def encode_mask(old: Array, new: Array, mask: Array, codes: Array, big: Array, fill: Array) -> int:
    """As `plain.encode_mask`; codes and big need room for an entry per element."""
    width = old.itemsize * 8
    c, b = fill[2], fill[3]
    for at in range(0, old.size, 64):
        bits = _changes(old, new, at)
        mask[at >> 6] = bits
        while bits:
            i = np.int64(at) + np.int64(_lowest(bits))
            bits &= bits - _ONE
            code = _step(old[i], new[i], width)
            codes[c] = min(code, ESCAPE_CODE)
            big[b] = code
            b += code >= ESCAPE_CODE
            c += 1
    changes: int = c - fill[2]
    fill[2], fill[3] = c, b
    return changes


@compiled
def apply_gaps(
    bits: Array, words: Array, first: int, gaps: Array, far: Array, codes: Array, big: Array, lanes: Array
) -> None:
    width, i, f, b = bits.itemsize * 8, np.int64(-1), np.int64(0), np.int64(0)
    places = np.empty(min(_TILE, gaps.size), np.int64)
    for start in range(0, gaps.size, _TILE):
        n = min(_TILE, gaps.size - start)
        for k in range(n):
            gap = np.int64(gaps[start + k])
            if gap == ESCAPE_GAP:
                gap += np.int64(far[f])
                f += 1
            i += gap + 1
            places[k] = i
            _will_write(bits, i)
        if first >= 0:
            _count(words, first, width, places, n, -1, lanes)
        for k in range(n):
            code = np.int64(codes[start + k])
            if code == ESCAPE_CODE:
                code = np.int64(big[b])
                b += 1
            bits[places[k]] = _stepped(bits[places[k]], code, width)
        if first >= 0:
            _count(words, first, width, places, n, 1, lanes)


@compiled
def apply_mask(bits: Array, mask: Array, codes: Array, big: Array) -> None:
    width, k, b = bits.itemsize * 8, 0, 0
    for at in range(mask.size):
        left = mask[at]
        while left:
            i = np.int64(at << 6) + np.int64(_lowest(left))
            left &= left - _ONE
            code = np.int64(codes[k])
            k += 1
            if code == ESCAPE_CODE:
                code = np.int64(big[b])
                b += 1
            bits[i] = _stepped(bits[i], code, width)
