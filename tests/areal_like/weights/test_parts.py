"""Weights in parts, one per rank of a learner: each part is compared and encoded on its rank; together they equal what
one rank would publish, to the bit and to the digest."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from areal_like.weights.digest import text_of
from areal_like.weights.layout import Layout
from areal_like.weights.replica import Replica, Route
from areal_like.weights.state import State, TensorSpec
from tests.areal_like.weights.states import DTYPES, changed, compile_from, message, random_state, specs_of
from tests.seeds import seeded

BLOCK = 8192


def in_parts(whole: State, parts: int) -> list[State]:
    states = [State(whole.specs, part=part, parts=parts) for part in range(parts)]
    for part, state in enumerate(states):
        Layout(whole.specs, BLOCK, part, parts).copy_out(whole.buffer, state.buffer)
    return states


@settings(max_examples=100, deadline=None)
@example(shapes=[(), (5,)], dtype="bfloat16", parts=2)
@given(
    shapes=st.lists(st.lists(st.integers(0, 70), max_size=3).map(tuple), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
    parts=st.integers(1, 5),
)
def test_parts_tile_the_weights_and_their_digests_add_up(shapes, dtype, parts) -> None:
    specs = [TensorSpec(str(i), dtype, shape) for i, shape in enumerate(shapes)]
    whole = random_state(specs, seeded(0))
    states, again = in_parts(whole, parts), State(specs)
    for part, state in enumerate(states):
        layout = Layout(specs, BLOCK, part, parts)
        for start in range(0, state.nbytes, 999):
            layout.copy_in(state.buffer[start : start + 999], start, again.buffer)
    assert sum(state.nbytes for state in states) == whole.nbytes
    assert again.buffer.tobytes() == whole.buffer.tobytes()
    lanes = sum((state.lanes() for state in states), np.zeros(2, np.uint64))
    assert text_of(lanes, whole.words.size) == whole.digest()
    pieces = [[bits for _, bits in state.tensors()] for state in states]
    for (spec, bits), *of in zip(whole.tensors(), *pieces, strict=True):
        assert np.array_equal(np.concatenate(of), bits), spec


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [0, 1, 5, 8, 12])
def test_shards_are_those_of_torch(rows: int, ranks: int) -> None:
    """FSDP splits by torch.chunk; a rank that gets no chunk has nothing."""
    rows_of = [len(chunk) for chunk in torch.arange(rows).chunk(ranks)] if rows else []
    expected = np.cumsum([0, *rows_of, *[0] * (ranks - len(rows_of))]) * 6
    assert TensorSpec("w", "bfloat16", (rows, 2, 3)).shards(ranks) == expected.tolist()


@pytest.mark.parametrize("compiled_from", [0, 1 << 60])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_that_were_encoded_apart_make_the_weights_and_digest_of_one(
    parts, dtype, compiled_from, monkeypatch
) -> None:
    compile_from(monkeypatch, compiled_from)
    rng, specs = seeded(0), specs_of(dtype)
    before = random_state(specs, rng)
    replica = Replica(State(specs, before.buffer.copy()))
    replica.shape(specs, BLOCK, parts)
    assert replica.same_bits(0, before.digest())
    apart = [Layout(specs, BLOCK, part, parts, apart=True) for part in range(parts)]
    for version, density in enumerate([0.001, 0.01, 0.1, 0.9, 0.0], 1):
        after = changed(before, density, rng)
        steps = zip(in_parts(before, parts), in_parts(after, parts), apart, strict=True)
        sent = [message(old, new, layout, version - 1, version) for old, new, layout in steps]
        there = [
            message(before, after, Layout(specs, BLOCK, part, parts), version - 1, version) for part in range(parts)
        ]
        assert sent == there, "cut alike, wherever it is encoded"
        replica.take([Route(None, [each]) for each in sent], version, after.digest())
        assert replica.state.buffer.tobytes() == after.buffer.tobytes()
        before = after
