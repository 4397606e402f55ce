"""Positions of tensors and of parts of them in the bytes."""

import re

import numpy as np
import pytest

from areal_like.weights.state import State, TensorSpec, spans

NINE = TensorSpec("nine", "uint8", (9,))
WIDE = TensorSpec("wide", "float32", (3, 5))


def test_a_tensor_begins_at_a_word_and_padding_is_zero() -> None:
    state = State([NINE, WIDE])
    assert [(spec.nbytes, spec.space) for spec in state.specs] == [(9, 16), (60, 64)] and state.nbytes == 80
    for _, bits in state.tensors():
        bits[:] = ~bits
    assert state.buffer.tolist() == [255] * 9 + [0] * 7 + [255] * 60 + [0] * 4
    assert state.words.tolist()[:2] == [2**64 - 1, 255]


@pytest.mark.parametrize(
    ("spec", "parts", "shards", "cuts"),
    [
        (TensorSpec("number", "float32", ()), 3, [0, 1, 1, 1], [0, 8, 8, 8]),
        (NINE, 2, [0, 5, 9], [0, 8, 16]),
        (NINE, 4, [0, 3, 6, 9, 9], [0, 8, 8, 16, 16]),
        (WIDE, 2, [0, 10, 15], [0, 40, 64]),
        (WIDE, 3, [0, 5, 10, 15], [0, 24, 40, 64]),
    ],
)
def test_a_part_has_the_words_that_begin_in_its_shard(spec, parts: int, shards: list[int], cuts: list[int]) -> None:
    assert spec.shards(parts) == shards and spec.cuts(parts) == cuts


def test_what_a_part_has_of_neighbours_is_one_stretch() -> None:
    specs = [NINE, WIDE, NINE]
    assert spans(specs, 0, 1) == [(0, 96)]
    assert spans(specs, 0, 2) == [(0, 8), (16, 56), (80, 88)]
    assert spans(specs, 1, 2) == [(8, 16), (56, 80), (88, 96)]
    assert spans([NINE, NINE, WIDE], 2, 4) == [(8, 16), (24, 32), (72, 96)]
    assert spans([NINE, NINE, WIDE], 3, 4) == [], "a rank without a row"


@pytest.mark.parametrize("nbytes", [79, 81, 88])
def test_a_buffer_of_another_size_is_refused(nbytes: int) -> None:
    text = f"weights buffer holds {nbytes} bytes where the tensors need 80"
    with pytest.raises(ValueError, match=re.escape(text)):
        State([NINE, WIDE], np.zeros(nbytes, np.uint8))


def test_a_buffer_between_words_is_refused_and_another_is_used_as_it_is() -> None:
    memory = np.zeros(11, np.uint64).view(np.uint8)
    for off in range(1, 8):
        with pytest.raises(ValueError, match="a weights buffer begins at a multiple of 8 bytes"):
            State([NINE, WIDE], memory[off : off + 80])
    assert State([NINE, WIDE], memory[8:]).buffer.ctypes.data == memory.ctypes.data + 8
