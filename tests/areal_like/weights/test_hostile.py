"""The bytes of a delta: anything wrong is refused before a byte is written, and an accepted one stays within bounds."""

import random
import struct

import numpy as np
import pytest
import zstandard

from areal_like.weights import planes
from areal_like.weights.codec import Lanes
from areal_like.weights.delta import DeltaHead, advance, ends_of, read, write
from areal_like.weights.layout import Layout
from areal_like.weights.planes import DENSE, GAPS, MASK, SKIP, Coded, DeltaError, pack, unpack
from areal_like.weights.state import State, TensorSpec
from tests.areal_like.weights.states import changed, compile_from, message, random_state, specs_of
from tests.seeds import seeded


def a_delta(density: float = 0.05) -> tuple[State, Layout, bytes]:
    rng = seeded(0)
    before = random_state(specs_of("bfloat16"), rng)
    layout = Layout(before.specs, 16384)
    return before, layout, message(before, changed(before, density, rng), layout)


def test_no_part_of_a_delta_is_taken_for_a_whole() -> None:
    before, layout, data = a_delta()
    for length in [*range(0, 400), *range(400, len(data), 97)]:
        with pytest.raises(DeltaError):
            read(data[:length], layout)
    with pytest.raises(DeltaError):
        read(data + b"\0", layout)
    for other in (Layout(before.specs, 32768), Layout(before.specs[:-2], 16384)):
        with pytest.raises(DeltaError, match="other tensors"):
            read(data, other)


@pytest.mark.parametrize("numpy_only", [False, True])
def test_changed_bytes_are_refused_or_stay_within_the_weights(monkeypatch, numpy_only: bool) -> None:
    """The state lies between two guard areas; kernels check no bounds, so accepted deltas must not need them."""
    compile_from(monkeypatch, 1 << 62 if numpy_only else 0)
    chance = random.Random(0)
    outcomes = {"refused": 0, "taken": 0}
    for density in (0.05, 0.2):
        before, layout, data = a_delta(density)
        memory = np.full(before.nbytes + (2 << 16), 0xA5, np.uint8)
        inside = memory[1 << 16 : (1 << 16) + before.nbytes]
        for _ in range(400):
            bad = bytearray(data)
            for _ in range(chance.choice([1, 1, 2, 5])):
                at = chance.randrange(min(len(bad), chance.choice([100, 400, len(bad)])))
                bad[at] = chance.choice([bad[at] ^ 1 << chance.randrange(8), 0, 255])
            inside[:] = before.buffer
            try:
                delta = read(bad, layout)
            except DeltaError:
                outcomes["refused"] += 1
                continue
            outcomes["taken"] += 1
            advance(delta, layout, State(before.specs, inside), Lanes(layout, before.words))
            guards = np.concatenate([memory[: 1 << 16], memory[-(1 << 16) :]])
            assert (guards == 0xA5).all()
    assert min(outcomes.values()) > 50, outcomes


SMALL = Layout([TensorSpec("w", "bfloat16", (64, 64)), TensorSpec("b", "bfloat16", (4,))], 4096)
HEAD = DeltaHead(3, 7, "0" * 31 + "1", "ab" * 16)
START = b"ALD2" + bytes([3, *[0] * 7, 7, *[0] * 7]) + bytes(15) + b"\1" + b"\xab" * 16
KEY = SMALL.key.to_bytes(8, "little")
WHOLE = START + KEY + bytes([3, 0, 0, 0]) + bytes([1, *[0] * 15, 2, *[0] * 7]) + b"xyz"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (WHOLE[:63], "too short"),
        (WHOLE[: 64 + 23], "too short"),
        (b"ALD1" + WHOLE[4:], "not a delta"),
        (START + bytes(8) + WHOLE[60:], "other tensors"),
        (START + KEY + b"\2" + WHOLE[61:], "other blocks"),
        (WHOLE[:-1], "do not add up"),
        (WHOLE + b"\0", "do not add up"),
        (WHOLE, "a block that is too short"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(data: bytes, reason: str) -> None:
    assert write(HEAD, SMALL, [b"x", b"", b"yz"]) == WHOLE and ends_of(WHOLE) == (7, "ab" * 16)
    with pytest.raises(DeltaError, match=reason):
        read(data, SMALL)


COUNT = 5000
BLOCK = Layout([TensorSpec("w", "bfloat16", (1, COUNT))], 1 << 20).blocks[0]
KINDS = {"gaps": np.uint8, "far": np.uint32, "masks": np.uint64, "short": np.uint8, "big": np.uint32}


def packed(*rows: tuple[int, int], body: bytes = b"", **given: list[int]) -> bytes:
    """A block with a coding and changes per segment, and these planes."""
    codings, changes = zip(*rows, strict=True)
    arrays = {name: np.array(given.get(name, []), kind) for name, kind in KINDS.items()}
    whole = [np.frombuffer(body, np.uint8)] if body else []
    return pack(Coded(np.array(codings, np.uint8), np.array(changes, np.uint32), **arrays, body=whole))


MASK_OF_1 = [0, 0, 0, 1, *[0] * (-(-COUNT // 64) - 4)]
BEYOND = [*MASK_OF_1[:-1], 1 << COUNT % 64]
ALL = [2**64 - 1] * (COUNT // 64)
GAPS_OF_3: dict = {"gaps": [1, 2, 3], "short": [0, 0, 0]}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (packed((9, 0)), "coding"),
        (packed((GAPS, 0)), "number of changes"),
        (packed((GAPS, COUNT + 1)), "number of changes"),
        (packed((SKIP, 1)), "does not fit its segment"),
        (packed((DENSE, 5), body=bytes(2 * COUNT)), "does not fit its segment"),
        (packed((GAPS, 3), **GAPS_OF_3, far=[0]), "escapes do not agree"),
        (packed((GAPS, 3), **GAPS_OF_3, big=[0]), "escapes do not agree"),
        (packed((GAPS, 1), gaps=[1], short=[1], far=[0, 0]), "more escapes"),
        (packed((GAPS, 1), gaps=[1], short=[1], big=[0, 0]), "more escapes"),
        (packed((GAPS, 1), gaps=[255], short=[0], far=[COUNT - 255]), "within"),
        (packed((GAPS, 1), gaps=[255], short=[0], far=[2**32 - 1]), "within"),
        (packed((MASK, 2), masks=MASK_OF_1, short=[0, 0]), "within"),
        (packed((MASK, 1), masks=BEYOND, short=[0]), "within"),
        (packed((MASK, 1), masks=MASK_OF_1[:-1], short=[0]), "another size|decompressed"),
        (packed((DENSE, 0), body=bytes(2 * COUNT - 2)), "another size|decompressed"),
        (packed((SKIP, 0)) + b"\0", "do not add up"),
    ],
)
def test_numbers_that_do_not_agree_are_refused(data: bytes, reason: str) -> None:
    assert unpack(bytes(32 + 5), BLOCK) == [], "skipped"
    with pytest.raises(DeltaError, match=reason):
        unpack(data, BLOCK)


@pytest.mark.parametrize("coding", [GAPS, MASK])
def test_a_vector_has_no_changes_only_bits(coding: int) -> None:
    vector = Layout([TensorSpec("b", "bfloat16", (8,))], 1 << 20).blocks[0]
    with pytest.raises(DeltaError, match="does not fit its segment"):
        unpack(packed((coding, 1)), vector)


def test_a_plane_that_would_unpack_to_more_is_refused_before_it_takes_memory(monkeypatch) -> None:
    """A frame of a few bytes that claims to be, or unpacks to, a gigabyte."""
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    stream = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    monkeypatch.setattr(planes.zstandard, "ZstdDecompressor", lambda: pytest.fail("it was read"))
    for stored in (bomb, stream):
        head = struct.pack("<8I", 0, 0, len(stored), 0, 0, 0, 0, 0)
        with pytest.raises(DeltaError, match="another size"):
            unpack(head + b"\2" + struct.pack("<I", 400) + stored, BLOCK)
