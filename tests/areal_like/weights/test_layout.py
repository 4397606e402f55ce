"""Where blocks and segments begin and end, which both sides must compute alike."""

import re
from collections import Counter

import pytest

from areal_like.weights.layout import Layout, Segment
from areal_like.weights.state import TensorSpec
from tests.areal_like.weights.states import DTYPES, specs_of


@pytest.mark.parametrize("block_bytes", [0, 4095, 4097, 6144])
def test_blocks_of_no_whole_pages_are_refused(block_bytes: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"block_bytes must be a multiple of 4096, not {block_bytes}")):
        Layout([], block_bytes)


def test_every_segment_has_its_place() -> None:
    specs = [
        TensorSpec("norm", "bfloat16", (33,)),  # 66 bytes and 6 of padding
        TensorSpec("w", "bfloat16", (100, 61)),  # 12,200 bytes: a block of 8,192, and 4,008
        TensorSpec("bias", "bfloat16", (2000,)),  # 4,000: fits beside them
        TensorSpec("gain", "bfloat16", (5,)),  # 10 and 6: joins the bias
        TensorSpec("x", "float32", (64, 64)),  # 16,384
    ]
    blocks = [
        [Segment(0, 72, 0, 72, 8, plain=True)],
        [Segment(72, 8264, 9, 4096, 16, plain=False)],
        [Segment(8264, 12272, 1033, 2004, 16, plain=False), Segment(12272, 16288, 1534, 4016, 8, plain=True)],
        [Segment(16288, 24480, 2036, 2048, 32, plain=False)],
        [Segment(24480, 32672, 3060, 2048, 32, plain=False)],
    ]
    layout = Layout(specs, 8192)
    assert [list(block.segments) for block in layout.blocks] == blocks
    assert [block.end for block in layout.blocks] == [72, 8264, 16288, 24480, 32672] and layout.nbytes == 32672
    assert [layout.pieces(segment) for block in layout.blocks for segment in block.segments] == [
        [(0, 0, 33)], [(1, 0, 4096)], [(1, 4096, 6100)], [(2, 0, 2000), (3, 0, 5)], [(4, 0, 2048)], [(4, 2048, 4096)],
    ]  # fmt: skip


@pytest.mark.parametrize(("shape", "plain"), [((64, 64), False), ((63, 65), True), ((4096,), True), ((1, 4096), False)])
def test_a_matrix_of_4096_elements_has_a_coding_of_its_own(shape: tuple[int, ...], plain: bool) -> None:
    (block,) = Layout([TensorSpec("w", "bfloat16", shape)], 1 << 20).blocks
    assert [segment.plain for segment in block.segments] == [plain]


def test_plain_segments_join_only_within_a_block() -> None:
    """Three vectors of 4,096 bytes in blocks of 8,192: two, and one."""
    specs = [TensorSpec(name, "uint8", (4096,)) for name in "abc"]
    assert [[(s.start, s.stop) for s in block.segments] for block in Layout(specs, 8192).blocks] == [
        [(0, 8192)],
        [(8192, 12288)],
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 3])
def test_every_element_is_in_one_piece(dtype: str, parts: int) -> None:
    specs, seen = specs_of(dtype), Counter[tuple[int, int]]()
    for part in range(parts):
        for apart in (False, True):
            layout = Layout(specs, 4096, part, parts, apart=apart)
            for segment in (segment for block in layout.blocks for segment in block.segments):
                for tensor, start, stop in layout.pieces(segment):
                    assert start < stop
                    seen.update((tensor, element) for element in range(start, stop))
    expected = {(i, element) for i, spec in enumerate(specs) for element in range(spec.count)}
    assert seen.keys() == expected and set(seen.values()) == {2}, "once with the whole, once apart"


def test_the_key_is_another_for_other_tensors_blocks_or_parts() -> None:
    spec = TensorSpec("w", "bfloat16", (2, 3))
    layouts = [
        Layout([spec], 4096),
        Layout([spec, spec], 4096),
        Layout([TensorSpec("v", "bfloat16", (2, 3))], 4096),
        Layout([TensorSpec("w", "float16", (2, 3))], 4096),
        Layout([TensorSpec("w", "bfloat16", (3, 2))], 4096),
        Layout([spec], 8192),
        Layout([spec], 4096, 0, 2),
        Layout([spec], 4096, 1, 2),
    ]
    assert len({layout.key for layout in layouts}) == len(layouts)
    assert Layout([spec], 4096, 1, 2, apart=True).key == layouts[-1].key
