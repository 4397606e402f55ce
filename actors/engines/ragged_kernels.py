"""Compiled attention of one new token per slot, on a CPU: each sequence is read only as far as it goes.

Keys and values are float32, or the bits of bfloat16; sums are float32. Compiled at first use (seconds) for a width of
heads, which LLVM unrolls, and a dtype, and kept beside this file or in numba's folder of the user. The exponential is a
polynomial that is computed for several positions at once (the coefficients of Cephes' exp2f).
"""

import functools
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.base import BaseContext
from numba.core.typing import BaseContext as TypingContext
from numba.core.typing import Signature
from numba.extending import intrinsic

from areal_like.weights.kernels import Array, Intrinsic, compiled

BLOCK = 64
"""Positions whose keys or values all query heads of a group read before the next ones."""
_ORDER = {"reassoc", "contract", "nsz", "arcp"}
"""What the compiler may do with sums. It must not assume that there are no NaN: broken weights are to be noticed."""
_LOG2_E = np.float32(1.4426950408889634)
_LEAST, _HALF, _ONE, _ZERO = np.float32(-126.0), np.float32(0.5), np.float32(1.0), np.float32(0.0)
_C6, _C5, _C4 = np.float32(1.535336188319500e-4), np.float32(1.339887440266574e-3), np.float32(9.618437357674640e-3)
_C3, _C2, _C1 = np.float32(5.550332471162809e-2), np.float32(2.402264791363012e-1), np.float32(6.931472028550421e-1)

_intrinsic: Callable[[Callable[..., Intrinsic]], Callable[..., np.float32]] = intrinsic
_inlined = njit(nogil=True, fastmath=_ORDER, inline="always")


@_intrinsic
def _number(typingctx: TypingContext, value: types.Number) -> Intrinsic:
    """A float32 as it is, or of the 16 bits of a bfloat16."""

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: list[ir.Value]) -> ir.Value:
        if isinstance(signature.args[0], types.Float):
            return args[0]
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], word), word(16)), ir.FloatType())

    return types.float32(value), codegen


@_intrinsic
def _power_of_two(typingctx: TypingContext, exponent: types.Integer) -> Intrinsic:
    """2 to an int32 of -126 to 127: put into the exponent's bits."""

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: list[ir.Value]) -> ir.Value:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.add(args[0], word(127)), word(23)), ir.FloatType())

    return types.float32(types.int32), codegen


@_inlined
def _scores(query: Array, keys: Array, scores: Array, first: int, end: int, width: int) -> np.float32:
    """Products of a query [width] with keys [time, width] from `first` to `end` → the largest one."""
    top = np.float32(-np.inf)
    t = first
    while t + 4 <= end:
        a, b, c, d = _ZERO, _ZERO, _ZERO, _ZERO
        for i in range(width):
            x = query[i]
            a += x * _number(keys[t, i])
            b += x * _number(keys[t + 1, i])
            c += x * _number(keys[t + 2, i])
            d += x * _number(keys[t + 3, i])
        scores[t], scores[t + 1], scores[t + 2], scores[t + 3] = a, b, c, d
        top = max(top, max(max(a, b), max(c, d)))
        t += 4
    while t < end:
        a = _ZERO
        for i in range(width):
            a += query[i] * _number(keys[t, i])
        scores[t] = a
        top = max(top, a)
        t += 1
    return top


@_inlined
def _soften(scores: Array, count: int, top: np.float32, scale: np.float32) -> np.float32:
    """`scores` → 2 ** (scale · (score − top)), at least 2 ** -126; returns their sum."""
    total = _ZERO
    for t in range(count):
        x = max((scores[t] - top) * scale, _LEAST)
        whole = np.int32(x - _HALF)  # x is at most 0: the nearest integer
        r = x - np.float32(whole)
        p = ((((((_C6 * r + _C5) * r + _C4) * r + _C3) * r) + _C2) * r + _C1) * r + _ONE
        weight = p * _power_of_two(whole)
        scores[t] = weight
        total += weight
    return total


@_inlined
def _mix(weights: Array, values: Array, out: Array, first: int, end: int, width: int) -> None:
    """Add to `out` [width] the values [time, width] from `first` to `end`, weighted."""
    t = first
    while t + 8 <= end:
        a, b, c, d = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        e, f, g, h = weights[t + 4], weights[t + 5], weights[t + 6], weights[t + 7]
        for i in range(width):
            low = a * _number(values[t, i]) + b * _number(values[t + 1, i])
            low += c * _number(values[t + 2, i]) + d * _number(values[t + 3, i])
            high = e * _number(values[t + 4, i]) + f * _number(values[t + 5, i])
            high += g * _number(values[t + 6, i]) + h * _number(values[t + 7, i])
            out[i] += low + high
        t += 8
    while t < end:
        a = weights[t]
        for i in range(width):
            out[i] += a * _number(values[t, i])
        t += 1


@functools.cache
def kernel(width: int, dtype: str) -> Callable[..., None]:
    """For heads of so many dimensions in a cache of this dtype: attend with query float32 [n, kv_heads, group, width]
    to keys and values [slots, kv_heads, time, width], float32 or uint16 (bfloat16's bits), of which slot i has
    `lengths` int64 [n] → `out` like the query. Only slots `first` to `end`: threads share a step."""

    def attend(
        query: Array, keys: Array, values: Array, lengths: Array, scale: np.float32, out: Array, first: int, end: int
    ) -> None:
        group, scale2 = query.shape[2], scale * _LOG2_E
        scores = np.empty((group, keys.shape[2]), np.float32)
        tops = np.empty(group, np.float32)
        for i in range(first, end):
            count = lengths[i]
            for h in range(query.shape[1]):
                tops[:] = np.float32(-np.inf)
                for t in range(0, count, BLOCK):
                    for g in range(group):
                        top = _scores(query[i, h, g], keys[i, h], scores[g], t, min(count, t + BLOCK), width)
                        tops[g] = max(tops[g], top)
                for g in range(group):
                    tops[g] = _ONE / _soften(scores[g], count, tops[g], scale2)
                    out[i, h, g] = _ZERO
                for t in range(0, count, BLOCK):
                    for g in range(group):
                        _mix(scores[g], values[i, h], out[i, h, g], t, min(count, t + BLOCK), width)
                for g in range(group):
                    for d in range(width):
                        out[i, h, g, d] *= tops[g]

    # Files of its own: processes that compile different ones at once could mix up those of one name.
    attend.__qualname__ = f"attend_{width}_{dtype.removeprefix('torch.')}"
    return compiled(attend, fastmath=_ORDER)
