"""The bytes of a delta, and the errors for bytes that are none."""

import re

import pytest

from areal_like.weights.delta import DeltaHead, ends_of, largest, opened, read, write
from areal_like.weights.layout import Layout
from areal_like.weights.planes import DeltaError
from areal_like.weights.state import TensorSpec

LAYOUT = Layout([TensorSpec("w", "bfloat16", (64, 64)), TensorSpec("b", "bfloat16", (4,))], 4096)
HEAD = DeltaHead(3, 7, "0" * 31 + "1", "ab" * 16)
BLOCKS = [b"x", b"", b"yz"]
KEY = LAYOUT.key.to_bytes(8, "little")
START = b"ALD2" + bytes([3, *[0] * 7, 7, *[0] * 7]) + bytes(15) + b"\1" + b"\xab" * 16
WHOLE = START + KEY + bytes([3, 0, 0, 0]) + bytes([1, *[0] * 15, 2, *[0] * 7]) + b"xyz"


def test_a_head_the_sizes_of_the_blocks_the_blocks() -> None:
    assert write(HEAD, LAYOUT, BLOCKS) == WHOLE
    assert opened(WHOLE, LAYOUT) == (HEAD, BLOCKS) and ends_of(WHOLE) == (7, "ab" * 16)


def test_weights_without_a_tensor_have_a_delta_of_a_head_alone() -> None:
    empty = Layout([], 4096)
    delta = read(write(HEAD, empty, []), empty)
    assert delta.head == HEAD and list(delta.blocks) == []


def test_one_is_never_said_to_need_much_more_than_twice_the_weights() -> None:
    """So much memory a plan may claim before a subscriber refuses it."""
    layout = Layout([TensorSpec("w", "bfloat16", (512, 1024))], 1 << 16)
    assert 2 * layout.nbytes < largest(layout) < 2.01 * layout.nbytes


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (WHOLE[:63], "a delta that is too short"),
        (WHOLE[:64], "a delta that is too short"),
        (WHOLE[: 64 + 23], "a delta that is too short"),
        (b"ALD1" + WHOLE[4:], "not a delta"),
        (START + bytes(8) + WHOLE[60:], "a delta of weights with other tensors, or cut into other blocks"),
        (START + KEY + b"\2" + WHOLE[61:], "a delta of weights with other tensors, or cut into other blocks"),
        (WHOLE[:-1], "a delta whose blocks do not add up to its size"),
        (WHOLE + b"\0", "a delta whose blocks do not add up to its size"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, reason: str) -> None:
    with pytest.raises(DeltaError, match=f"^{re.escape(reason)}$"):
        opened(data, LAYOUT)
