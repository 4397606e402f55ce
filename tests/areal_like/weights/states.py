"""Random weights and changes to them, for the tests of this folder."""

import numpy as np

from areal_like.weights import digest as compiled
from areal_like.weights.codec import Encoder, Lanes
from areal_like.weights.delta import DeltaHead, advance, read, write
from areal_like.weights.digest import text_of
from areal_like.weights.layout import Layout
from areal_like.weights.planes import pack
from areal_like.weights.state import State, TensorSpec

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
SPECIAL = {
    8: [0, 0x80, 0x7F, 0xFF, 0x7C, 0xFC, 0x01, 0x81],
    16: [0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x8001, 0x7C00, 0xFC00],
    32: [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 1, (1 << 31) + 1],
}
"""Zeros, infinities, NaN with payloads, the smallest subnormals, of both signs."""


def specs_of(dtype: str) -> list[TensorSpec]:
    """A norm, a matrix in several blocks, tiny tensors, one of an odd size, an empty one."""
    shapes = {"norm": (33,), "large": (130, 301), "tiny": (5, 7), "bias": (301,), "odd": (67, 71), "none": (0, 4)}
    return [TensorSpec(name, dtype, shape) for name, shape in shapes.items()]


def random_state(specs: list[TensorSpec], rng: np.random.Generator) -> State:
    state = State(specs)
    for spec, bits in state.tensors():
        bits[:] = rng.integers(0, 1 << (8 * spec.itemsize), spec.count, dtype=np.uint64)
    return state


def changed(state: State, density: float, rng: np.random.Generator, small: float = 0.9) -> State:
    """A copy with this share of the elements changed: `small` of them by one step, the others to any bits."""
    after = State(state.specs, state.buffer.copy())
    for spec, bits in after.tensors():
        width = 8 * spec.itemsize
        places = np.flatnonzero(rng.random(spec.count) < density)
        values = rng.integers(0, 1 << width, places.size, dtype=np.uint64).astype(bits.dtype)
        special = rng.random(places.size) < 0.1
        values[special] = rng.choice(np.array(SPECIAL[width], bits.dtype), int(special.sum()))
        near = rng.random(places.size) < small
        values[near] = bits[places[near]] ^ bits.dtype.type(1)
        bits[places] = values
    return after


def in_parts(whole: State, parts: int, block: int) -> list[State]:
    states = [State(whole.specs, part=part, parts=parts) for part in range(parts)]
    for part, state in enumerate(states):
        Layout(whole.specs, block, part, parts).copy_out(whole, state.buffer)
    return states


def message(before: State, after: State, layout: Layout, base: int = 0, version: int = 1) -> bytes:
    lanes = Lanes(layout, before.words)
    base_digest, encoder = text_of(lanes.total(), layout.nbytes // 8), Encoder(layout)
    blocks = [pack(encoder.encode(block, before.buffer, after.buffer, lanes)) for block in layout.blocks]
    head = DeltaHead(base, version, base_digest, text_of(lanes.total(), layout.nbytes // 8))
    return write(head, layout, blocks)


def applied(data: bytes, before: State, layout: Layout) -> tuple[State, str]:
    """A copy of `before` after the delta, and its incremental digest."""
    state, lanes = State(before.specs, before.buffer.copy()), Lanes(layout, before.words)
    return state, advance(read(data, layout), layout, state, lanes)


def compile_from(monkeypatch, nbytes: int) -> None:
    monkeypatch.setattr(compiled, "COMPILED_FROM", nbytes)
