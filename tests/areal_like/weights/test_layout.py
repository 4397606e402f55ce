"""Positions of tensors, parts, blocks and segments in the bytes, which both sides must compute alike."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from areal_like.weights.digest import text_of
from areal_like.weights.layout import Layout
from areal_like.weights.state import State, TensorSpec
from tests.areal_like.weights.states import DTYPES, in_parts, random_state
from tests.seeds import seeded

NINE = TensorSpec("nine", "uint8", (9,))
WIDE = TensorSpec("wide", "float32", (3, 5))
BLOCK = 8192


def test_a_tensor_begins_at_a_word_and_padding_is_zero() -> None:
    state = State([NINE, WIDE])
    for _, bits in state.tensors():
        bits[:] = ~bits
    assert state.buffer.tolist() == [255] * 9 + [0] * 7 + [255] * 60 + [0] * 4
    assert state.words.tolist()[:2] == [2**64 - 1, 255]


@pytest.mark.parametrize("ranks", [1, 3, 7])
@pytest.mark.parametrize("rows", [0, 1, 5, 12])
def test_shards_are_those_of_torch(rows: int, ranks: int) -> None:
    """FSDP splits by torch.chunk; a rank that gets no chunk has nothing."""
    rows_of = [len(chunk) for chunk in torch.arange(rows).chunk(ranks)] if rows else []
    expected = np.cumsum([0, *rows_of, *[0] * (ranks - len(rows_of))]) * 6
    assert TensorSpec("w", "bfloat16", (rows, 2, 3)).shards(ranks) == expected.tolist()


def test_a_buffer_of_another_size_or_between_words_is_refused() -> None:
    with pytest.raises(ValueError, match="79 bytes where the tensors need 80"):
        State([NINE, WIDE], np.zeros(79, np.uint8))
    memory = np.zeros(11, np.uint64).view(np.uint8)
    with pytest.raises(ValueError, match="multiple of 8"):
        State([NINE, WIDE], memory[1:81])
    assert State([NINE, WIDE], memory[8:]).buffer.ctypes.data == memory.ctypes.data + 8


def test_the_key_is_another_for_other_tensors_blocks_or_parts() -> None:
    spec = TensorSpec("w", "bfloat16", (2, 3))
    others = [("v", "bfloat16", (2, 3)), ("w", "float16", (2, 3)), ("w", "bfloat16", (3, 2))]
    layouts = [Layout([spec], 4096), *(Layout([TensorSpec(*each)], 4096) for each in others)]
    layouts += [Layout([spec, spec], 4096), Layout([spec], 8192), *(Layout([spec], 4096, part, 2) for part in (0, 1))]
    assert len({layout.key for layout in layouts}) == len(layouts)
    assert Layout([spec], 4096, 1, 2, apart=True).key == layouts[-1].key


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
    states, again = in_parts(whole, parts, BLOCK), State(specs)
    for part, state in enumerate(states):
        layout = Layout(specs, BLOCK, part, parts)
        sizes = [sum(each.stop - each.start for each in block.segments) for block in layout.blocks]
        assert sum(sizes) == layout.nbytes and max(sizes, default=0) <= BLOCK
        for start in range(0, state.nbytes, 999):
            layout.copy_in(state.buffer[start : start + 999], start, again.buffer)
    assert sum(state.nbytes for state in states) == whole.nbytes
    assert again.buffer.tobytes() == whole.buffer.tobytes()
    lanes = sum((state.lanes() for state in states), np.zeros(2, np.uint64))
    assert text_of(lanes, whole.words.size) == whole.digest()
    pieces = [[bits for _, bits in state.tensors()] for state in states]
    for (spec, bits), *of in zip(whole.tensors(), *pieces, strict=True):
        assert np.array_equal(np.concatenate(of), bits), spec
