"""The update of an SGLang server's weights: which elements have changed, and where the new bits are.

The engine encodes patches, the loader inside the server (`sglang_loader`) decodes them. A patch holds no values: it
names a file with all of the new weights, memory that the engine shares with the servers of its host. Applying it twice
does no harm, and one that names all elements fits unknown weights. No torch here.
"""

from __future__ import annotations

import msgspec
import numpy as np

from areal_like.weights.state import State, TensorSpec

NAME = "areal_like.patch"
"""Name of the one tensor that the server receives: the bytes of the path to the patch."""
Stored = dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...], int]]]
"""Name of one of our tensors → its parts that SGLang's loaders know by names of their own: name, shape, strides and
offset (in elements of the whole). Others go by our names. See `sglang_weights.stored_names`."""


class Patch(msgspec.Struct, frozen=True):
    """`weights`: path of a file with the buffer of a `State` of `specs`; `digest`: of these weights. `changes`: index
    of a tensor → its changed elements, uint32 in flat order; None: all of it. Without changes a patch asks for a
    comparison of digests."""

    weights: str
    digest: str
    specs: list[TensorSpec]
    stored: Stored
    changes: dict[int, bytes | None]

    def state(self) -> State:
        """The new weights, read where they are used. Raises OSError, ValueError."""
        return State(self.specs, np.asarray(np.memmap(self.weights, np.uint8, "c")))


def places_of(found: np.ndarray, spec: TensorSpec) -> bytes | None:
    """A tensor's entry in `Patch.changes` for changed elements `found`, int64 [n]; all of it where that is shorter."""
    shorter = 8 * len(found) < spec.nbytes and spec.count <= 1 << 32
    return found.astype(np.uint32).tobytes() if shorter else None


def read(path: str) -> Patch:
    """Raises OSError, and ValueError for a file that holds no patch."""
    return msgspec.msgpack.decode(np.memmap(path, np.uint8, "r").data, type=Patch)
