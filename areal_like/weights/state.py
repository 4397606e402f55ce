"""A model's weights as one flat byte buffer and a table of where each tensor lies. NumPy only.

bfloat16 has no NumPy type: its bits are held as uint16. Equal bits mean an equal digest (xxh3-128 over the buffer),
which is how "the learner and the actor hold the same weights" is proven.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

BITS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32, "uint8": np.uint8}
"""dtype name → NumPy type that holds its bits."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.count * np.dtype(BITS[self.dtype]).itemsize


class State:
    """Tensors back to back in `buffer` (uint8 [nbytes]) in the order of `specs`."""

    def __init__(self, specs: list[TensorSpec], buffer: np.ndarray | None = None):
        self.specs = specs
        self.nbytes = sum(spec.nbytes for spec in specs)
        self.buffer = np.zeros(self.nbytes, np.uint8) if buffer is None else buffer
        if self.buffer.nbytes != self.nbytes:
            raise ValueError(f"weights buffer holds {self.buffer.nbytes} bytes where the tensors need {self.nbytes}")

    def tensors(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        """(spec, flat view of its bits [count]); writing to the view writes to the buffer."""
        start = 0
        for spec in self.specs:
            stop = start + spec.nbytes
            yield spec, self.buffer[start:stop].view(BITS[spec.dtype])
            start = stop

    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.buffer.data)


@dataclass(frozen=True, slots=True)
class Update:
    """Verified weights of one version, ready for an engine's `load`."""

    version: int
    digest: str
    state: State
