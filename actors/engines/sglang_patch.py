"""The update of an SGLang server's weights: one array of bytes that names all tensors and their changes.

    length of the head | head (JSON: digest, and per tensor name, dtype, shape, number of changes) | pieces
    piece = places (uint32, in the tensor's flat order), then values (bits)        or, of a tensor sent whole, all bits

A patch holds the new values themselves, so applying it twice does no harm. With all tensors whole, it can be applied to
unknown weights. `digest` is that of the weights after it. One without count asks for a comparison of digests only. The
engine writes patches, the loader inside the server (`sglang_loader`) reads them. Every piece begins at a multiple of 8
bytes. No torch here.

The pieces, or all of the patch, may lie in a file that the head names: memory that the engine shares with the servers
of its host (`sglang_weights`), of which each process of a server reads what it has a place for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np

from areal_like.weights.state import BITS, State, TensorSpec
from areal_like.weights.update import Changes, Where

NAME = "areal_like.patch"
"""Name of the one tensor that carries a patch."""
Stored = dict[str, list]
"""Name of one of our tensors → the parts of it that SGLang's loaders know by names of their own: rows of name, shape,
strides and offset (in elements of the whole). Others go by our names. See `sglang_weights.stored_names`."""
WHOLE = -1
"""Stands for the number of count of a tensor that is sent whole."""
_ALIGN = 8
_MOST_PLACES = 1 << 32


class PatchError(ValueError):
    """Bytes that are no patch."""


@dataclass(frozen=True, slots=True)
class TensorChange:
    """Of tensor `spec`: new `bits` [n] at `places` int64 [n], in flat order; `places` None: all of its elements."""

    spec: TensorSpec
    places: np.ndarray | None
    bits: np.ndarray


@dataclass(frozen=True, slots=True)
class Patch:
    specs: list[TensorSpec]
    digest: str
    changes: list[TensorChange]
    stored: Stored = field(default_factory=dict)


def write(
    state: State,
    digest: str,
    base: State | None,
    changes: Changes | None = None,
    stored: Stored | None = None,
) -> np.ndarray:
    """uint8 [bytes]: leads from `base`, a state of the same tensors, to `state`; from any weights where `base` is None.
    A tensor is sent whole where that is shorter. Only what `changes` (those since `base`) names is compared, where
    given."""
    rows, parts = [], []
    before = [bits for _, bits in base.tensors()] if base else None
    for i, (spec, bits) in enumerate(state.tensors()):
        where: list[Where] = changes.tensors.get(i, []) if changes else [slice(0, spec.count)]
        places = _differing(before[i], bits, where) if before else None
        if places is not None and not len(places):
            count = 0
        elif places is None or len(places) * (4 + spec.itemsize) >= spec.nbytes or spec.count > _MOST_PLACES:
            count = WHOLE
            parts.append(bits.view(np.uint8))
        else:
            count = len(places)
            parts += [places.astype(np.uint32).view(np.uint8), bits[places].view(np.uint8)]
        rows.append([spec.name, spec.dtype, list(spec.shape), count])
    return _joined({"digest": digest, "stored": stored or {}, "tensors": rows}, parts)


def _differing(before: np.ndarray, bits: np.ndarray, where: list[Where]) -> np.ndarray:
    """Places at which two tensors differ, int64 [n], in order; of `where` only."""
    found = [np.zeros(0, np.int64)]
    for each in where:
        unlike = np.flatnonzero(before[each] != bits[each])
        found.append(unlike + each.start if isinstance(each, slice) else each[unlike])
    return found[1] if len(where) == 1 and isinstance(where[0], slice) else np.unique(np.concatenate(found))


def digest_probe(state: State, digest: str, stored: Stored | None = None) -> np.ndarray:
    """uint8 [bytes]: a patch without changes, which asks whether the weights have this digest."""
    rows = [[spec.name, spec.dtype, list(spec.shape), 0] for spec in state.specs]
    return _joined({"digest": digest, "stored": stored or {}, "tensors": rows}, [])


def whole_at(path: str, state: State, digest: str, stored: Stored) -> np.ndarray:
    """uint8 [bytes]: a patch with all tensors, whose pieces are the file at `path`, the buffer of `state`."""
    rows = [[spec.name, spec.dtype, list(spec.shape), WHOLE] for spec in state.specs]
    return _joined({"digest": digest, "stored": stored, "tensors": rows, "pieces": path}, [])


def pointer(path: str) -> np.ndarray:
    """uint8 [bytes]: stands for the patch in the file at `path`."""
    return _joined({"patch": path}, [])


def _joined(head: dict, parts: list[np.ndarray]) -> np.ndarray:
    text = np.frombuffer(json.dumps(head).encode(), np.uint8)
    pieces = [np.array([text.size], "<u8").view(np.uint8), text, *parts]
    data = np.zeros(sum(_padded(piece.size) for piece in pieces), np.uint8)
    at = 0
    for piece in pieces:
        data[at : at + piece.size] = piece
        at += _padded(piece.size)
    return data


def read(data: np.ndarray) -> Patch:
    """The patch in `data`, uint8; the changes' bits are views of it. Raises PatchError, OSError."""
    if data.size < _ALIGN:
        raise PatchError("a patch that is too short")
    try:
        size = int(data[:8].view("<u8")[0])
        head = json.loads(data[8 : 8 + size].tobytes())
        if "patch" in head:
            return read(np.asarray(np.memmap(head["patch"], np.uint8, "c")))
        if "pieces" in head:
            return _patch_of(head, np.asarray(np.memmap(head["pieces"], np.uint8, "c")))
        return _patch_of(head, data[8 + _padded(size) :])
    except (KeyError, TypeError, IndexError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PatchError(f"not a patch: {error!r}") from None


def _patch_of(head: dict, data: np.ndarray) -> Patch:
    at, specs, changes = 0, [], []
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
        changes.append(TensorChange(spec, places, _taken(data, at, nbytes).view(BITS[dtype])))
        at += _padded(nbytes)
    if at != data.size:
        raise PatchError(f"{data.size} bytes of changes where the head tells of {at}")
    return Patch(specs, head["digest"], changes, head["stored"])


def _taken(data: np.ndarray, at: int, size: int) -> np.ndarray:
    if size < 0 or at + size > data.size:
        raise PatchError("a patch that is too short")
    return data[at : at + size]


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
