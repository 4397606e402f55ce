"""A coded block and its bytes: which coding each segment has, and the planes that all of its segments share.

    number of escapes (far, big) | stored size of each plane | coding, changes of each segment | the planes

Planes: gaps (a byte each), far (their escapes, byte by byte: all lowest bytes, all second ones, ...), masks, codes (two
to a byte), big (as far), body (dense bits), in the order of the segments. All but the body are compressed by zstd where
that makes them smaller. Similar bytes lie together, so level 1 is enough.

`unpack` trusts nothing: the size of every plane follows from the segments and the numbers of changes, a compressed one
must announce exactly that size before memory is allocated for it, and every position is checked to lie within its
segment. Its result can be applied without any further check. Raises DeltaError.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import zstandard

from areal_like.weights import plain
from areal_like.weights.layout import Block, Segment

SKIP, DENSE, GAPS, MASK = range(4)
CODINGS = ("skip", "dense", "gaps", "mask")
_HEAD = struct.Struct("<8I")
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6)
"""Level 1, set to look for next to no repetitions: there are none, and matches by chance make codes longer."""
_WORTH_IT = 64
"""Bytes below which a plane is not compressed."""
_WINDOW = 1 << 24


class DeltaError(ValueError):
    """Bytes that are no delta for these weights; nothing has been written."""


@dataclass(slots=True)
class Coded:
    """`codings` uint8 and `changes` uint32, per segment; the planes: gaps uint8, far uint32, masks uint64, short uint8
    (codes, one to a byte), big uint32, body uint8. `changes` of a dense or skipped segment is 0."""

    codings: np.ndarray
    changes: np.ndarray
    gaps: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    far: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    masks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    short: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    big: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    body: Sequence[np.ndarray] = ()


def mask_words(segment: Segment) -> int:
    return -(-segment.count // 64)


def pack(coded: Coded) -> bytes:
    compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)

    def smaller(plane: np.ndarray) -> bytes:
        squeezed = compressor.compress(plane.data) if plane.nbytes >= _WORTH_IT else b""
        return squeezed if 0 < len(squeezed) < plane.nbytes else plane.tobytes()

    planes = [coded.gaps, _by_byte(coded.far), coded.masks, plain.pack_codes(coded.short), _by_byte(coded.big)]
    stored = [smaller(plane) for plane in planes]
    size = sum(part.nbytes for part in coded.body)
    head = _HEAD.pack(coded.far.size, coded.big.size, *map(len, stored), size)
    table = coded.codings.tobytes() + coded.changes.astype("<u4").tobytes()
    return b"".join([head, table, *stored, *(part.data for part in coded.body)])


def unpack(data: bytes | memoryview, block: Block) -> Coded:
    """The coded block in `data`; the body as one array."""
    view, n = memoryview(data), len(block.segments)
    if len(view) < _HEAD.size + 5 * n:
        raise DeltaError("a block that is too short")
    n_far, n_big, *stored = _HEAD.unpack_from(view)
    codings = np.frombuffer(view, np.uint8, n, _HEAD.size)
    changes = np.frombuffer(view, "<u4", n, _HEAD.size + n).astype(np.uint32)
    _check_table(block, codings, changes)
    steps = int(changes[(codings == GAPS) | (codings == MASK)].sum(dtype=np.int64))
    gaps = int(changes[codings == GAPS].sum(dtype=np.int64))
    if n_far > gaps or n_big > steps:
        raise DeltaError("more escapes than changes")
    rows = list(zip(block.segments, codings.tolist(), changes.tolist(), strict=True))
    masks = sum(8 * mask_words(segment) for segment, coding, _ in rows if coding == MASK)
    raw = [
        gaps,
        4 * n_far,
        masks,
        -(-steps // 2),
        4 * n_big,
        sum(segment.nbytes for segment, coding, _ in rows if coding == DENSE),
    ]
    starts = np.cumsum([_HEAD.size + 5 * n, *stored], dtype=np.int64).tolist()
    if starts[-1] != len(view):
        raise DeltaError("a block whose planes do not add up to its size")
    parts = [_plane(view[a:b], size) for (a, b), size in zip(pairwise(starts), raw, strict=True)]
    coded = Coded(
        codings, changes,
        gaps=np.frombuffer(parts[0], np.uint8).copy(), far=_from_bytes(parts[1]),
        masks=np.frombuffer(parts[2], np.uint8).copy().view(np.uint64),
        short=plain.unpack_codes(np.frombuffer(parts[3], np.uint8), steps), big=_from_bytes(parts[4]),
        body=[np.frombuffer(parts[5], np.uint8)],
    )  # fmt: skip
    _check_places(rows, coded)
    return coded


def _check_table(block: Block, codings: np.ndarray, changes: np.ndarray) -> None:
    if (codings > MASK).any():
        raise DeltaError("a coding that does not belong here")
    counts = np.array([segment.count for segment in block.segments])
    is_plain = np.array([segment.plain for segment in block.segments])
    sparse = codings > DENSE
    if (sparse & is_plain).any() or (changes[~sparse] != 0).any():
        raise DeltaError("a coding that does not fit its segment")
    if (changes > counts).any() or (changes[sparse] == 0).any():
        raise DeltaError("a number of changes that does not fit its segment")


def _plane(stored: memoryview, size: int) -> bytes | memoryview:
    if len(stored) == size:
        return stored
    try:
        about = zstandard.get_frame_parameters(stored)
        if about.content_size != size or about.window_size > max(_WINDOW, 2 * size) or about.dict_id:
            raise DeltaError("a plane of another size than its changes need")
        plane = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"a plane that can't be decompressed: {error}") from None
    if len(plane) != size:
        raise DeltaError("a plane of another size than its changes need")
    return plane


def _by_byte(numbers: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(numbers.astype("<u4").view(np.uint8).reshape(-1, 4).T)


def _from_bytes(data: bytes | memoryview) -> np.ndarray:
    """uint32."""
    return np.frombuffer(data, np.uint8).reshape(4, -1).T.copy().view(np.uint32).reshape(-1)


def _check_places(rows: list[tuple[Segment, int, int]], coded: Coded) -> None:
    """Every place that the planes lead to lies within its segment, and there are as many escapes as are used."""
    if np.count_nonzero(coded.gaps == plain.ESCAPE_GAP) != coded.far.size:
        raise DeltaError("gaps and their escapes do not agree")
    if np.count_nonzero(coded.short == plain.ESCAPE_CODE) != coded.big.size:
        raise DeltaError("codes and their escapes do not agree")
    for segment, coding, parts in parts_of(rows, coded):
        if coding == GAPS:
            gaps, far = parts[0], parts[1]
            last = int(gaps.sum(dtype=np.int64)) + int(far.sum(dtype=np.int64)) + gaps.size - 1
            wrong = last >= segment.count
        elif coding == MASK:
            mask, short = parts[0], parts[1]
            beyond = int(mask[-1]) >> (segment.count % 64) if segment.count % 64 else 0
            wrong = bool(beyond) or int(np.bitwise_count(mask).sum(dtype=np.int64)) != short.size
        else:
            continue
        if wrong:
            raise DeltaError(f"changes that do not lie within their segment ({CODINGS[coding]})")


def parts_of(rows: list[tuple[Segment, int, int]], coded: Coded) -> list[tuple[Segment, int, tuple[np.ndarray, ...]]]:
    """What belongs to each segment that is not skipped: of GAPS (gaps, far, short, big), of MASK (mask, short, big), of
    DENSE (bits,)."""
    found: list[tuple[Segment, int, tuple[np.ndarray, ...]]] = []
    gap = far = mask = code = big = at = 0
    body = coded.body[0] if coded.body else np.zeros(0, np.uint8)
    for segment, coding, changes in rows:
        if coding in (GAPS, MASK):
            short = coded.short[code : code + changes]
            escapes = int(np.count_nonzero(short == plain.ESCAPE_CODE))
            steps = (short, coded.big[big : big + escapes])
            code, big = code + changes, big + escapes
        if coding == GAPS:
            gaps = coded.gaps[gap : gap + changes]
            escapes = int(np.count_nonzero(gaps == plain.ESCAPE_GAP))
            found.append((segment, coding, (gaps, coded.far[far : far + escapes], *steps)))
            gap, far = gap + changes, far + escapes
        elif coding == MASK:
            words = mask_words(segment)
            found.append((segment, coding, (coded.masks[mask : mask + words], *steps)))
            mask += words
        elif coding == DENSE:
            found.append((segment, coding, (body[at : at + segment.nbytes],)))
            at += segment.nbytes
    return found
