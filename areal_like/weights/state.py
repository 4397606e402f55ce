"""A model's weights as one flat byte buffer and a table of where each tensor lies. NumPy only.

bfloat16 and the 8-bit floats have no NumPy type: their bits are held as unsigned integers. Each tensor begins at a
multiple of `ALIGN` bytes, and what is between two of them is zero, so the buffer is a sequence of whole words as well.
Equal bits mean an equal digest (`areal_like.weights.digest`), which is how "the learner and the actor hold the same
weights" is proven.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from areal_like.weights.digest import digest_of

if TYPE_CHECKING:
    from areal_like.weights.changes import Changes

BITS = {
    "bfloat16": np.uint16,
    "float16": np.uint16,
    "float32": np.uint32,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
    "uint8": np.uint8,
}
"""dtype name → NumPy type that holds its bits."""
ALIGN = 8


@dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @cached_property
    def itemsize(self) -> int:
        return np.dtype(BITS[self.dtype]).itemsize

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize

    @property
    def space(self) -> int:
        """Bytes that it takes in a state's buffer."""
        return -(-self.nbytes // ALIGN) * ALIGN


class State:
    """Tensors one after the other in `buffer` (uint8 [nbytes]) in the order of `specs`.

    A `buffer` that is given is used as it is. Raises ValueError if it has another size or is not aligned.
    """

    def __init__(self, specs: list[TensorSpec], buffer: np.ndarray | None = None):
        self.specs = specs
        self.nbytes = sum(spec.space for spec in specs)
        self.buffer = np.zeros(self.nbytes, np.uint8) if buffer is None else buffer
        if self.buffer.nbytes != self.nbytes:
            raise ValueError(f"weights buffer holds {self.buffer.nbytes} bytes where the tensors need {self.nbytes}")
        if self.buffer.ctypes.data % ALIGN:
            raise ValueError(f"a weights buffer begins at a multiple of {ALIGN} bytes")

    @property
    def words(self) -> np.ndarray:
        """The buffer as uint64 [nbytes / 8]."""
        return self.buffer.view(np.uint64)

    def tensors(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        """(spec, flat view of its bits [count]); writing to the view writes to the buffer."""
        start = 0
        for spec in self.specs:
            yield spec, self.buffer[start : start + spec.nbytes].view(BITS[spec.dtype])
            start += spec.space

    def digest(self) -> str:
        """By a sweep over all bits."""
        return digest_of(self.words)


@dataclass(frozen=True, slots=True)
class Update:
    """Verified weights of one version, ready for an engine's `load`. An engine that holds the weights with the digest
    `changes.since` needs to write no more than what `changes` names; without it, or with other weights, all."""

    version: int
    digest: str
    state: State
    changes: Changes | None = None
