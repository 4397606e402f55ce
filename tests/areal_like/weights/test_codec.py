"""Deltas are decoded bit for bit, for any bits, by NumPy and by compiled kernels; digests are those of a full sweep."""

import numpy as np
import pytest

from areal_like.weights import digest, kernels, plain
from areal_like.weights.codec import Encoder
from areal_like.weights.delta import largest
from areal_like.weights.digest import K, lanes_of, mixed, sweep, text_of
from areal_like.weights.layout import Layout
from areal_like.weights.planes import CODINGS, pack
from areal_like.weights.state import State, TensorSpec
from tests.areal_like.weights import states
from tests.areal_like.weights.states import applied, changed, compile_from, message, random_state
from tests.seeds import seeded

NEVER = 1 << 62


@pytest.mark.parametrize("compiled_from", [0, NEVER], ids=["compiled", "numpy"])
@pytest.mark.parametrize("dtype", states.DTYPES)
@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.15, 0.5, 1.0])
def test_every_bit_arrives(monkeypatch, compiled_from: int, dtype: str, density: float) -> None:
    compile_from(monkeypatch, compiled_from)
    rng = seeded(round(1000 * density))
    before = random_state(states.specs_of(dtype), rng)
    after, layout = changed(before, density, rng), Layout(before.specs, 16384)
    assert len(layout.blocks) > 2
    state, digest = applied(message(before, after, layout), before, layout)
    assert state.buffer.tobytes() == after.buffer.tobytes()
    assert digest == after.digest() == state.digest()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("density", [0.002, 0.04, 0.2])
def test_the_compiled_twin_writes_the_same_bytes(monkeypatch, dtype: str, density: float) -> None:
    rng = seeded(5)
    before = random_state([TensorSpec("w", dtype, (400, 500)), TensorSpec("v", dtype, (90, 77))], rng)
    after, layout = changed(before, density, rng, small=0.95), Layout(before.specs, 1 << 17)
    written = []
    for nbytes in (0, NEVER):
        compile_from(monkeypatch, nbytes)
        written.append(message(before, after, layout))
    assert written[0] == written[1]


@pytest.mark.parametrize("width", [8, 16])
def test_steps_lead_from_any_bits_to_any_other(width: int) -> None:
    kind = {8: np.uint8, 16: np.uint16}[width]
    bits = np.arange(1 << width).astype(kind)
    for start in states.SPECIAL[width]:
        others = bits[bits != start]
        before = np.full(others.size, start, kind)
        codes = plain.steps(before, others)
        assert (plain.stepped(before, codes) == others).all()
        assert len(np.unique(codes)) == others.size and codes.max() == (1 << width) - 2


@pytest.mark.parametrize(
    ("shape", "density", "coding", "most"),
    [
        ((300, 300), 0.0, "skip", 0.0),
        ((300, 300), 0.01, "gaps", 0.016),
        ((300, 300), 0.2, "mask", 0.13),
        ((300, 300), 0.99, "dense", 1.0),
        ((90_000,), 0.01, "dense", 1.0),
    ],
)
def test_the_coding_that_is_chosen_is_short(shape: tuple[int, ...], density: float, coding: str, most: float) -> None:
    """`most`: bytes over those of the weights. At the highest density steps are large; a vector is sent as it is."""
    rng, small = seeded(6), 0.0 if density > 0.5 else 1.0
    before = random_state([TensorSpec("w", "bfloat16", shape)], rng)
    layout = Layout(before.specs, 1 << 20)
    coded = Encoder(layout).encode(layout.blocks[0], before.buffer, changed(before, density, rng, small).buffer)
    assert CODINGS[coded.codings[0]] == coding and len(pack(coded)) <= most * before.nbytes + 64


def test_the_upper_limit_holds_for_the_smallest_weights_and_is_about_twice_large_ones() -> None:
    before, after = (State([TensorSpec("a", "bfloat16", (1,))]) for _ in range(2))
    next(after.tensors())[1][:] = 7
    layout = Layout(before.specs, 4096)
    assert len(message(before, after, layout)) <= largest(layout)
    layout = Layout([TensorSpec("w", "bfloat16", (512, 1024))], 1 << 16)
    assert 2 * layout.nbytes < largest(layout) < 2.01 * layout.nbytes


SPLITMIX = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
"""The first numbers of the published generator from seed 0."""


def test_the_digest_is_two_sums_of_splitmix_and_the_number_of_words() -> None:
    assert [int(mixed(np.zeros(1, np.uint64), position)[0]) for position in (1, 2, 3)] == list(SPLITMIX)
    sums = sum(SPLITMIX), sum((x & 0xFFFFFFFF) * (x >> 32) for x in SPLITMIX)
    assert sweep(np.zeros(3, np.uint64), 1).tolist() == [each % 2**64 for each in sums]
    assert text_of(np.array([1, 0xAB << 56], np.uint64), 0) == "0000000000000001ab00000000000000"
    assert text_of(np.full(2, 5, np.uint64), int(K)) == 2 * f"{SPLITMIX[0] + 5:016x}"


def test_the_compiled_digest_is_that_of_numpy() -> None:
    words = seeded(1).integers(0, 1 << 63, digest.COMPILED_FROM // 8 + 1, dtype=np.uint64)
    fast = lanes_of(words, 77)
    assert digest.kernels_for(words.nbytes) is kernels and (sweep(words, 77) == fast).all()
