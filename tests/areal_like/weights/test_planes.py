"""The bytes of a coded block, and how little a foreign one can make its reader do."""

import re

import numpy as np
import pytest
import zstandard

from areal_like.weights import planes
from areal_like.weights.layout import Layout
from areal_like.weights.planes import DENSE, GAPS, MASK, SKIP, Coded, DeltaError, pack, unpack
from areal_like.weights.state import TensorSpec

MATRIX = Layout([TensorSpec("w", "bfloat16", (64, 65))], 1 << 20).blocks[0]
WITH_VECTOR = Layout([TensorSpec("w", "bfloat16", (64, 65)), TensorSpec("b", "bfloat16", (8,))], 1 << 20).blocks[0]


def table(*rows: tuple[int, int]) -> dict[str, np.ndarray]:
    codings, changes = zip(*rows, strict=True)
    return {"codings": np.array(codings, np.uint8), "changes": np.array(changes, np.uint32)}


def test_escapes_lie_byte_by_byte_and_codes_two_to_a_byte() -> None:
    coded = Coded(
        **table((GAPS, 3), (DENSE, 0)),
        gaps=np.array([255, 1, 255], np.uint8),
        far=np.array([0x04, 0x0102], np.uint32),
        short=np.array([1, 15, 2], np.uint8),
        big=np.array([0x0A0B0C0D], np.uint32),
        body=[np.arange(16, dtype=np.uint8)],
    )
    numbers = b"".join(each.to_bytes(4, "little") for each in (2, 1, 3, 8, 0, 2, 4, 16))
    planes = b"\xff\1\xff" + b"\4\2\0\1\0\0\0\0" + b"\xf1\2" + b"\x0d\x0c\x0b\x0a" + bytes(range(16))
    packed = numbers + b"\2\1" + b"\3\0\0\0\0\0\0\0" + planes
    assert pack(coded) == packed
    again = unpack(packed, WITH_VECTOR)
    assert (again.far == coded.far).all() and (again.big == coded.big).all() and (again.short == coded.short).all()
    assert (again.gaps == coded.gaps).all() and bytes(again.body[0]) == bytes(range(16))


def test_a_block_without_changes_is_its_table() -> None:
    packed = pack(Coded(**table((SKIP, 0), (SKIP, 0))))
    assert packed == bytes(32 + 2 * 5) and unpack(packed, WITH_VECTOR).codings.tolist() == [SKIP, SKIP]
    with pytest.raises(DeltaError, match=r"^a block that is too short$"):
        unpack(packed[:-1], WITH_VECTOR)
    with pytest.raises(DeltaError, match=r"^a block whose planes do not add up to its size$"):
        unpack(packed + b"\0", WITH_VECTOR)


def test_all_elements_may_have_changed_each_by_an_escape() -> None:
    mask, short = np.full(65, 2**64 - 1, np.uint64), np.full(64 * 65, 15, np.uint8)
    coded = Coded(**table((MASK, 64 * 65)), masks=mask, short=short, big=np.full(64 * 65, 16, np.uint32))
    again = unpack(pack(coded), MATRIX)
    assert again.changes.tolist() == [64 * 65] and (again.big == 16).all() and (again.masks == mask).all()


@pytest.mark.parametrize(("coding", "changes"), [(GAPS, 1), (MASK, 1), (SKIP, 1)])
def test_a_run_of_vectors_has_no_changes_only_bits(coding: int, changes: int) -> None:
    with pytest.raises(DeltaError, match=r"^a coding that does not fit its segment$"):
        unpack(pack(Coded(**table((SKIP, 0), (coding, changes)))), WITH_VECTOR)


@pytest.mark.parametrize(("far", "big"), [(2, 0), (0, 2)])
def test_more_escapes_than_changes_are_refused(far: int, big: int) -> None:
    planes = {"gaps": np.ones(1, np.uint8), "short": np.ones(1, np.uint8)}
    coded = Coded(**table((GAPS, 1)), **planes, far=np.zeros(far, np.uint32), big=np.zeros(big, np.uint32))
    with pytest.raises(DeltaError, match=r"^more escapes than changes$"):
        unpack(pack(coded), MATRIX)


def frame(content: bytes, window_log: int, dictionary: bool = False) -> memoryview:
    """A frame of zstd (RFC 8878) that declares its size and requests a window; the content is stored as it is."""
    descriptor = 0x81 if dictionary else 0x80
    head = bytes([descriptor, window_log - 10 << 3]) + b"\7" * dictionary + len(content).to_bytes(4, "little")
    return memoryview(b"\x28\xb5\x2f\xfd" + head + (len(content) << 3 | 1).to_bytes(3, "little") + content)


CONTENT = bytes(range(200)) * 15
ANOTHER_SIZE = r"^a plane of another size than its changes need$"


def test_a_window_of_twice_the_plane_is_the_most_that_a_sender_may_ask_for(monkeypatch) -> None:
    monkeypatch.setattr(planes, "_WINDOW", 0)
    assert len(CONTENT) == 3000
    assert planes._plane(frame(CONTENT, 12), 3000) == CONTENT
    with pytest.raises(DeltaError, match=ANOTHER_SIZE):
        planes._plane(frame(CONTENT, 13), 3000)


def test_a_small_plane_may_ask_for_a_window_as_large_as_that_of_any() -> None:
    largest = planes._WINDOW.bit_length() - 1
    assert planes._plane(frame(CONTENT, largest), 3000) == CONTENT
    with pytest.raises(DeltaError, match=ANOTHER_SIZE):
        planes._plane(frame(CONTENT, largest + 1), 3000)


def test_a_plane_that_needs_a_dictionary_is_refused_unread(monkeypatch) -> None:
    monkeypatch.setattr(planes.zstandard, "ZstdDecompressor", lambda: pytest.fail("it was read"))
    with pytest.raises(DeltaError, match=ANOTHER_SIZE):
        planes._plane(frame(CONTENT, 12, dictionary=True), 3000)


def test_nothing_may_follow_a_plane() -> None:
    stored = zstandard.ZstdCompressor().compress(CONTENT)
    assert planes._plane(memoryview(stored), 3000) == CONTENT
    with pytest.raises(DeltaError, match=re.escape("a plane that can't be decompressed: ")):
        planes._plane(memoryview(stored + b"more"), 3000)
