"""Hostile weight updates, for `scripts.verify.fuzz --deltas`: the reader refuses them, or stays within the weights.

An input is a delta message: noise, a good one with bytes changed (mostly in its heads and tables), one with blocks cut
and rejoined, or blocks with hand-made planes that do not fit. It is read. If that succeeds, the compiled kernels,
which check no bounds, apply it to weights between two guards.
"""

from __future__ import annotations

import functools
import random
import struct

import numpy as np

from areal_like.weights import compiled
from areal_like.weights.codec import Encoder, Lanes
from areal_like.weights.delta import DeltaHead, advance, read, write
from areal_like.weights.layout import Layout
from areal_like.weights.planes import Coded, DeltaError, pack
from areal_like.weights.state import State, TensorSpec

from .fuzzing import Finding

GUARD = 1 << 16
SPECS = [
    TensorSpec("norm", "bfloat16", (33,)),
    TensorSpec("w", "bfloat16", (70, 131)),
    TensorSpec("e", "float8_e5m2", (67, 71)),
    TensorSpec("f", "float32", (64, 65)),
]
LAYOUT = Layout(SPECS, 8192)
DIGEST = "0" * 32


@functools.cache
def _weights() -> State:
    return State(SPECS, np.random.default_rng(0).integers(0, 256, State(SPECS).nbytes, dtype=np.uint8))


@functools.cache
def _blocks() -> list[list[bytes]]:
    """Packed blocks of good deltas of several densities."""
    rng, before, made = np.random.default_rng(1), _weights(), []
    for density in (0.0, 0.001, 0.03, 0.15, 0.6):
        after = State(SPECS, before.buffer.copy())
        for _, bits in after.tensors():
            places = rng.random(bits.size) < density
            bits[places] ^= rng.integers(1, 1 << (4 * bits.itemsize), int(places.sum())).astype(bits.dtype)
        encoder = Encoder(LAYOUT)
        made.append([pack(encoder.encode(b, before.buffer, after.buffer)) for b in LAYOUT.blocks])
    return made


def _message(blocks: list[bytes]) -> bytes:
    return write(DeltaHead(0, 1, DIGEST, DIGEST), LAYOUT, blocks)


def compile_all() -> None:
    """Good messages first, so that no input pays for compiling."""
    for blocks in _blocks():
        take([_message(blocks)])


def take(frames: list[bytes]) -> str:
    """ "refused" or "applied"."""
    try:
        delta = read(frames[0], LAYOUT)
    except DeltaError:
        return "refused"
    memory = np.full(State(SPECS).nbytes + 2 * GUARD, 0xA5, np.uint8)
    state = State(SPECS, memory[GUARD:-GUARD])
    state.buffer[:] = _weights().buffer
    compiled.COMPILED_FROM = 0
    advance(delta, LAYOUT, state, Lanes(LAYOUT, state.words))
    if (memory[:GUARD] != 0xA5).any() or (memory[-GUARD:] != 0xA5).any():
        raise Finding("a delta that wrote beyond the weights")
    return "applied"


def make(seed: int, number: int) -> tuple[str, list[bytes]]:
    """Input `number`, and its kind."""
    chance = random.Random(seed << 40 | number)
    blocks = chance.choice(_blocks())
    kind = chance.choices(["noise", "changed", "spliced", "planes"], [5, 50, 20, 25])[0]
    if kind == "noise":
        return kind, [chance.randbytes(chance.choice([0, 4, 60, 400]))]
    blocks = list(blocks)
    at = chance.randrange(len(blocks))
    if kind == "spliced":
        other = chance.choice(_blocks())
        cut = chance.randrange(len(blocks[at]) + 1)
        blocks[at] = blocks[at][:cut] + chance.choice(other)[chance.choice([0, cut]) :]
    elif kind == "planes":
        blocks[at] = _wrong_planes(chance, len(LAYOUT.blocks[at].segments))
    data = bytearray(_message(blocks))
    if kind == "changed":
        for _ in range(chance.choice([1, 1, 2, 4])):
            place = chance.randrange(min(len(data), chance.choice([80, 300, len(data)])))
            value = struct.pack("<I", chance.choice([0, 1, 255, 1 << 16, (1 << 31) - 1, (1 << 32) - 1]))
            data[place : place + 4] = value if chance.random() < 0.3 else bytes([chance.randrange(256)])
    return kind, [bytes(data)]


def _wrong_planes(chance: random.Random, n: int) -> bytes:
    """A block of the right form with random numbers."""
    codings = np.array([chance.choice([0, 1, 2, 2, 3, 4]) for _ in range(n)], np.uint8)
    changes = np.array([0 if c < 2 else chance.choice([1, 2, 7, 300]) for c in codings], np.uint32)
    gaps, steps = int(changes[codings == 2].sum()), int(changes[(codings == 2) | (codings == 3)].sum())
    rng = np.random.default_rng(chance.randrange(1 << 30))
    gap_bytes = rng.choice(np.array([0, 1, 30, 254, 255], np.uint8), gaps, p=[0.3, 0.3, 0.3, 0.05, 0.05])
    short = rng.integers(0, 16, steps).astype(np.uint8)
    far = rng.choice(np.array([0, 100, 5000, (1 << 32) - 1], np.uint32), int((gap_bytes == 255).sum()))
    big = rng.integers(0, 1 << 32, int((short == 15).sum()), dtype=np.uint64).astype(np.uint32)
    masks = np.zeros(chance.choice([0, 63, 75, 128, 143]), np.uint64)
    masks[rng.integers(0, max(1, masks.size), 7) if masks.size else []] = 1 << chance.randrange(64)
    body = rng.integers(0, 256, chance.choice([0, 4, 8, 40, 4757, 8192]), dtype=np.uint8)
    return pack(Coded(codings, changes, gap_bytes, far, masks, short, big, [body]))
