"""Deltas are decoded bit for bit, for any bits, by NumPy and by compiled kernels; digests are those of a full sweep;
bytes that are wrong are refused before a byte is written."""

import random
import struct

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from areal_like.weights import digest, kernels, plain, planes
from areal_like.weights.codec import Encoder, Lanes
from areal_like.weights.delta import DeltaHead, advance, ends_of, largest, read, write
from areal_like.weights.digest import K, lanes_of, mixed, sweep, text_of
from areal_like.weights.layout import Layout
from areal_like.weights.planes import CODINGS, DENSE, GAPS, MASK, SKIP, Coded, DeltaError, pack, unpack
from areal_like.weights.state import State, TensorSpec
from tests.areal_like.weights import states
from tests.areal_like.weights.states import (
    DTYPES,
    applied,
    changed,
    compile_from,
    in_parts,
    message,
    random_state,
    specs_of,
)
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
            layout.copy_in(state.buffer[start : start + 999], start, again)
    assert sum(state.nbytes for state in states) == whole.nbytes
    assert again.buffer.tobytes() == whole.buffer.tobytes()
    lanes = sum((state.lanes() for state in states), np.zeros(2, np.uint64))
    assert text_of(lanes, whole.words.size) == whole.digest()
    pieces = [[bits for _, bits in state.tensors()] for state in states]
    for (spec, bits), *of in zip(whole.tensors(), *pieces, strict=True):
        assert np.array_equal(np.concatenate(of), bits), spec


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
ONE_BLOCK = Layout([TensorSpec("w", "bfloat16", (1, COUNT))], 1 << 20).blocks[0]
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
    assert unpack(bytes(32 + 5), ONE_BLOCK) == [], "skipped"
    with pytest.raises(DeltaError, match=reason):
        unpack(data, ONE_BLOCK)


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
            unpack(head + b"\2" + struct.pack("<I", 400) + stored, ONE_BLOCK)
