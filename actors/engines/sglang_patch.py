"""The update of an SGLang server's weights: one array of bytes that names all tensors and their changes.

    length of the head | head (JSON: digest, sweep, and per tensor name, dtype, shape, number of changes) | pieces
    piece = places (uint32, in the tensor's flat order), then values (bits)        or, of a tensor sent whole, all bits

A patch holds the new values themselves, so applying it twice does no harm. With all tensors whole, it can be applied to
unknown weights. `digest` is that of the weights after it. One without count asks for a comparison of digests only. The
engine writes patches, the loader inside the server (`sglang_loader`) reads them. Every piece begins at a multiple of 8
bytes. No torch here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from areal_like.weights.state import BITS, State, TensorSpec

NAME = "areal_like.patch"
"""Name of the one tensor that carries a patch."""
WHOLE = -1
"""Stands for the number of count of a tensor that is sent whole."""
_ALIGN = 8
_MOST_PLACES = 1 << 32


class PatchError(ValueError):
    """Bytes that are no patch."""


@dataclass(frozen=True, slots=True)
class Change:
    """Of tensor `spec`: new `bits` [n] at `places` int64 [n], in flat order; `places` None: all of its elements."""

    spec: TensorSpec
    places: np.ndarray | None
    bits: np.ndarray


@dataclass(frozen=True, slots=True)
class Patch:
    specs: list[TensorSpec]
    digest: str
    changes: list[Change]
    sweep: bool = True


def write(state: State, digest: str, base: State | None, sweep: bool = True) -> np.ndarray:
    """uint8 [bytes]: leads from `base`, a state of the same tensors, to `state`; from any weights where `base` is None.
    A tensor is sent whole where that is shorter. Without `sweep`, the server may compute the digest from what changes
    and what it knows."""
    rows, parts = [], []
    before = [bits for _, bits in base.tensors()] if base else None
    for i, (spec, bits) in enumerate(state.tensors()):
        places = np.flatnonzero(before[i] != bits) if before else None
        if places is not None and not len(places):
            count = 0
        elif places is None or len(places) * (4 + spec.itemsize) >= spec.nbytes or spec.count > _MOST_PLACES:
            count = WHOLE
            parts.append(bits.view(np.uint8))
        else:
            count = len(places)
            parts += [places.astype(np.uint32).view(np.uint8), bits[places].view(np.uint8)]
        rows.append([spec.name, spec.dtype, list(spec.shape), count])
    return _joined(digest, rows, parts, sweep)


def digest_probe(state: State, digest: str) -> np.ndarray:
    """uint8 [bytes]: a patch without changes, which asks whether the weights have this digest."""
    rows = [[spec.name, spec.dtype, list(spec.shape), 0] for spec in state.specs]
    return _joined(digest, rows, [], True)


def _joined(digest: str, rows: list, parts: list[np.ndarray], sweep: bool) -> np.ndarray:
    told = {"digest": digest, "sweep": sweep, "tensors": rows}
    head = np.frombuffer(json.dumps(told).encode(), np.uint8)
    pieces = [np.array([head.size], "<u8").view(np.uint8), head, *parts]
    data = np.zeros(sum(_padded(piece.size) for piece in pieces), np.uint8)
    at = 0
    for piece in pieces:
        data[at : at + piece.size] = piece
        at += _padded(piece.size)
    return data


def read(data: np.ndarray) -> Patch:
    """The patch in `data`, uint8; the changes' bits are views of it. Raises PatchError."""
    if data.size < _ALIGN:
        raise PatchError("a patch that is too short")
    try:
        size = int(data[:8].view("<u8")[0])
        head = json.loads(data[8 : 8 + size].tobytes())
        at, specs, changes = 8 + _padded(size), [], []
        for name, dtype, shape, count in head["tensors"]:
            spec = TensorSpec(name, dtype, tuple(shape))
            specs.append(spec)
            if count == 0:
                continue
            places = None
            if count != WHOLE:
                places = _taken(data, at, 4 * count).view(np.uint32).astype(np.int64)
                at += _padded(4 * count)
                if places.max() >= spec.count:
                    raise PatchError(f"a place beyond the end of {name}")
            nbytes = spec.nbytes if places is None else count * spec.itemsize
            changes.append(Change(spec, places, _taken(data, at, nbytes).view(BITS[dtype])))
            at += _padded(nbytes)
        if at != data.size:
            raise PatchError(f"{data.size} bytes where the head tells of {at}")
        return Patch(specs, head["digest"], changes, head["sweep"])
    except (KeyError, TypeError, IndexError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PatchError(f"not a patch: {error!r}") from None


def _taken(data: np.ndarray, at: int, size: int) -> np.ndarray:
    if size < 0 or at + size > data.size:
        raise PatchError("a patch that is too short")
    return data[at : at + size]


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
