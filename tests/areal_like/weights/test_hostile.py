"""A delta with anything wrong in it is refused before a byte is written; an accepted one stays within bounds."""

import random
import struct

import numpy as np
import pytest
import zstandard

from areal_like.weights import planes
from areal_like.weights.codec import Encoder, Lanes
from areal_like.weights.delta import advance, read
from areal_like.weights.layout import Layout
from areal_like.weights.planes import DENSE, GAPS, MASK, Coded, DeltaError, pack, unpack
from areal_like.weights.state import State, TensorSpec
from tests.areal_like.weights.states import changed, compile_from, message, random_state, specs_of
from tests.seeds import seeded


def a_delta(density: float = 0.05) -> tuple[State, Layout, bytes]:
    rng = seeded(0)
    before = random_state(specs_of("bfloat16"), rng)
    layout = Layout(before.specs, 16384)
    return before, layout, message(before, changed(before, density, rng), layout)


def test_no_part_of_a_delta_is_taken_for_a_whole() -> None:
    _, layout, data = a_delta()
    for length in [*range(0, 400), *range(400, len(data), 97)]:
        with pytest.raises(DeltaError):
            read(data[:length], layout)
    with pytest.raises(DeltaError):
        read(data + b"\0", layout)


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
        for _ in range(1500):
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
    assert min(outcomes.values()) > 100, outcomes


COUNT = 5000
BLOCK = Layout([TensorSpec("w", "bfloat16", (1, COUNT))], 1 << 20).blocks[0]


def table(coding: int, changes: int) -> dict:
    return {"codings": np.array([coding], np.uint8), "changes": np.array([changes], np.uint32)}


GAPS_OF_3 = {"gaps": np.array([1, 2, 3], np.uint8), "short": np.zeros(3, np.uint8)}
MASK_OF_1 = np.zeros(-(-COUNT // 64), np.uint64)
MASK_OF_1[3] = 1
BEYOND = MASK_OF_1.copy()
BEYOND[-1] = np.uint64(1) << np.uint64(COUNT % 64)
ONE = np.zeros(1, np.uint8)


@pytest.mark.parametrize(
    ("coded", "reason"),
    [
        (Coded(**table(9, 0)), "coding"),
        (Coded(**table(GAPS, 0)), "number of changes"),
        (Coded(**table(GAPS, COUNT + 1)), "number of changes"),
        (Coded(**table(DENSE, 5), body=[np.zeros(2 * COUNT, np.uint8)]), "does not fit"),
        (Coded(**table(GAPS, 3), **GAPS_OF_3, far=np.zeros(1, np.uint32)), "escapes do not agree"),
        (Coded(**table(GAPS, 3), **GAPS_OF_3, big=np.zeros(1, np.uint32)), "escapes do not agree"),
        (Coded(**table(GAPS, 3), **GAPS_OF_3, far=np.zeros(4, np.uint32)), "more escapes"),
        (Coded(**table(GAPS, 1), gaps=ONE + 255, short=ONE, far=np.array([COUNT - 255], np.uint32)), "within"),
        (Coded(**table(GAPS, 1), gaps=ONE + 255, short=ONE, far=np.array([2**32 - 1], np.uint32)), "within"),
        (Coded(**table(MASK, 2), masks=MASK_OF_1, short=np.zeros(2, np.uint8)), "within"),
        (Coded(**table(MASK, 1), masks=BEYOND, short=ONE), "within"),
        (Coded(**table(MASK, 1), masks=MASK_OF_1[:-1], short=ONE), "another size|decompressed"),
        (Coded(**table(DENSE, 0), body=[np.zeros(2 * COUNT - 2, np.uint8)]), "another size|decompressed"),
    ],
)
def test_numbers_that_do_not_agree_are_refused(coded: Coded, reason: str) -> None:
    with pytest.raises(DeltaError, match=reason):
        unpack(pack(coded), BLOCK)


def test_the_last_element_is_still_within() -> None:
    coded = Coded(**table(GAPS, 1), gaps=ONE + 255, short=ONE, far=np.array([COUNT - 256], np.uint32))
    assert unpack(pack(coded), BLOCK).far.tolist() == [COUNT - 256]


def test_a_plane_that_would_unpack_to_more_is_refused_before_it_takes_memory(monkeypatch) -> None:
    """A frame of a few bytes that claims to be, or unpacks to, a gigabyte."""
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    stream = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    opened = []
    monkeypatch.setattr(planes.zstandard, "ZstdDecompressor", lambda: opened.append(1))
    for stored in (bomb, stream):
        head = struct.pack("<8I", 0, 0, len(stored), 0, 0, 0, 0, 0)
        data = head + b"\2" + struct.pack("<I", 400) + stored
        with pytest.raises(DeltaError, match="another size"):
            unpack(data, BLOCK)
    assert not opened


def test_an_encoder_is_not_fooled_by_its_own_scratch() -> None:
    """Blocks that are encoded one after the other do not leak into each other."""
    rng = seeded(1)
    before = random_state(specs_of("bfloat16"), rng)
    layout = Layout(before.specs, 16384)
    after, encoder = changed(before, 0.1, rng), Encoder(layout)
    twice = [[pack(encoder.encode(block, before.buffer, after.buffer)) for block in layout.blocks] for _ in range(2)]
    assert twice[0] == twice[1]
