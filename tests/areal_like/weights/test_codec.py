"""Deltas are decoded bit for bit, for any bits; and both sides' digests are those of a full sweep."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.weights import plain
from areal_like.weights.codec import Encoder
from areal_like.weights.delta import largest
from areal_like.weights.digest import sweep
from areal_like.weights.kernels import sweep as compiled_sweep
from areal_like.weights.layout import Layout
from areal_like.weights.planes import CODINGS, Coded, pack, unpack
from areal_like.weights.state import State, TensorSpec
from tests.areal_like.weights.states import (
    DTYPES,
    SPECIAL,
    applied,
    changed,
    compile_from,
    message,
    random_state,
    specs_of,
)
from tests.seeds import seeded

NEVER = 1 << 62


@pytest.fixture(params=[0, NEVER], ids=["compiled", "numpy"])
def kernels(request, monkeypatch) -> bool:
    compile_from(monkeypatch, request.param)
    return request.param == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.15, 0.5, 1.0])
def test_every_bit_arrives(kernels, dtype: str, density: float) -> None:
    rng = seeded(round(1000 * density))
    before = random_state(specs_of(dtype), rng)
    after = changed(before, density, rng)
    layout = Layout(before.specs, 16384)
    assert len(layout.blocks) > 2
    state, digest = applied(message(before, after, layout), before, layout)
    assert state.buffer.tobytes() == after.buffer.tobytes()
    assert digest == after.digest() == state.digest()


@settings(max_examples=150, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_any_bits_to_any_bits(data) -> None:
    """Widths, densities, special values and sizes drawn by hypothesis."""
    width = data.draw(st.sampled_from([8, 16, 32]))
    dtype = {8: "float8_e5m2", 16: "bfloat16", 32: "float32"}[width]
    count = data.draw(st.integers(4096, 4300))
    before, after = State([TensorSpec("w", dtype, (1, count))]), State([TensorSpec("w", dtype, (1, count))])
    rng = seeded(data.draw(st.integers(0, 1 << 30)))
    old, new = next(before.tensors())[1], next(after.tensors())[1]
    old[:] = rng.choice(np.array(SPECIAL[width], old.dtype), count)
    new[:] = old
    values = st.one_of(st.sampled_from(SPECIAL[width]), st.integers(0, (1 << width) - 1))
    for place, value in data.draw(st.dictionaries(st.integers(0, count - 1), values, max_size=40)).items():
        new[place] = value
    layout = Layout(before.specs, 4096 * data.draw(st.integers(1, 8)))
    with pytest.MonkeyPatch.context() as patch:
        compile_from(patch, data.draw(st.sampled_from([0, NEVER])))
        state, digest = applied(message(before, after, layout), before, layout)
        assert state.buffer.tobytes() == after.buffer.tobytes() and digest == after.digest()


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


def test_the_compiled_digest_is_that_of_numpy() -> None:
    words = seeded(1).integers(0, 1 << 63, 40_001, dtype=np.uint64)
    assert (sweep(words, 77) == compiled_sweep(words, 77)).all()


@pytest.mark.parametrize("width", [8, 16])
def test_steps_lead_from_any_bits_to_any_other(width: int) -> None:
    kind = {8: np.uint8, 16: np.uint16}[width]
    bits = np.arange(1 << width).astype(kind)
    for start in SPECIAL[width]:
        others = bits[bits != start]
        before = np.full(others.size, start, kind)
        codes = plain.steps(before, others)
        assert (plain.stepped(before, codes) == others).all()
        assert len(np.unique(codes)) == others.size and codes.max() == (1 << width) - 2


def test_a_step_of_one_is_the_next_number() -> None:
    """A code of ±1 leads to NumPy's neighbours (`nextafter`), across zero as well."""
    values = np.array([1.0, -1.0, 0.5, 6.1e-5, -3.0], np.float16)
    for code, towards in ((1, np.inf), (0, -np.inf)):
        moved = plain.stepped(values.view(np.uint16), np.full(values.size, code))
        assert (moved.view(np.float16) == np.nextafter(values, np.float16(towards))).all()
    assert plain.steps(np.array([0x8000], np.uint16), np.array([0], np.uint16)).tolist() == [1], "-0 to +0"


def test_vectors_and_tiny_tensors_are_sent_as_they_are() -> None:
    rng = seeded(4)
    specs = [TensorSpec("a", "bfloat16", (100_000,)), TensorSpec("b", "bfloat16", (60, 60))]
    before = random_state(specs, rng)
    after, layout = State(specs, before.buffer.copy()), Layout(specs, 1 << 20)
    (block,) = layout.blocks
    assert [segment.plain for segment in block.segments] == [True]
    assert CODINGS[Encoder(layout).encode(block, before.buffer, after.buffer).codings[0]] == "skip"
    after.buffer[7] ^= 1
    assert CODINGS[Encoder(layout).encode(block, before.buffer, after.buffer).codings[0]] == "dense"


def test_the_upper_limit_holds_for_the_smallest_weights() -> None:
    before, after = State([TensorSpec("a", "bfloat16", (1,))]), State([TensorSpec("a", "bfloat16", (1,))])
    next(after.tensors())[1][:] = 7
    layout = Layout(before.specs, 4096)
    assert len(message(before, after, layout)) <= largest(layout)


@pytest.mark.parametrize("density", [0.0005, 0.01, 0.06, 0.11, 0.2])
def test_the_coding_that_is_chosen_is_about_the_smallest(density: float) -> None:
    rng = seeded(6)
    before = random_state([TensorSpec("w", "bfloat16", (512, 512))], rng)
    after, layout = changed(before, density, rng, small=1.0), Layout(before.specs, 1 << 20)
    (block,) = layout.blocks
    (segment,) = block.segments
    chosen = len(pack(Encoder(layout).encode(block, before.buffer, after.buffer)))
    old, new = segment.bits(before.buffer), segment.bits(after.buffer)
    places = np.flatnonzero(old != new)
    sizes = [segment.nbytes]
    for as_gaps in (True, False):
        short, big = plain.encode_codes(plain.steps(old[places], new[places]))
        coded = Coded(
            np.array([2 if as_gaps else 3], np.uint8), np.array([places.size], np.uint32), short=short, big=big
        )
        if as_gaps:
            coded.gaps, coded.far = plain.encode_gaps(places)
        else:
            coded.masks = plain.encode_mask(places, segment.count)
        assert (unpack(pack(coded), block).changes == places.size).all()
        sizes.append(len(pack(coded)))
    assert chosen <= 1.05 * min(sizes)
