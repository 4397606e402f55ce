"""A coded block and its bytes: which coding each segment has, and the planes that all of its segments share.

    number of escapes (far, big) | stored size of each plane | coding, changes of each segment | the planes

Planes, in the order of the segments: gaps (a byte each), far (their escapes, all lowest bytes first, and so on), masks,
codes (two to a byte), big (as far), body (dense bits). All but the body are compressed by zstd where that helps.

`unpack` trusts nothing: the size of every plane follows from the segments and the numbers of changes, a compressed one
must announce exactly that size, and every position must lie within its segment. Raises DeltaError."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
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
_SAMPLE, _LEAST_GAIN = 4096, 0.1
"""Bytes from all over a plane show whether compressing it saves this share: both sides spend 2 ns per byte on it."""
_WINDOW = 1 << 24

Part = tuple[Segment, int, tuple[np.ndarray, ...]]
"""A segment, its coding, its part of the planes: GAPS gaps, far, short, big; MASK mask, short, big; DENSE bits."""


class DeltaError(ValueError):
    """Bytes that are no delta for these weights; nothing has been written."""


@dataclass(slots=True)
class Coded:
    """`codings` uint8 and `changes` uint32, per segment; the planes: gaps uint8, far uint32, masks uint64, short uint8
    (codes, one to a byte), big uint32, body uint8. `changes` of a dense or skipped segment is 0."""

    codings: np.ndarray
    changes: np.ndarray
    gaps: np.ndarray
    far: np.ndarray
    masks: np.ndarray
    short: np.ndarray
    big: np.ndarray
    body: Sequence[np.ndarray]


def pack(coded: Coded) -> bytes:
    compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)

    def smaller(plane: np.ndarray) -> bytes:
        if plane.nbytes < _WORTH_IT:
            return plane.tobytes()
        everywhere = plane.reshape(-1).view(np.uint8)[:: max(1, plane.nbytes // _SAMPLE)].tobytes()
        gains = len(compressor.compress(everywhere)) < (1 - _LEAST_GAIN) * len(everywhere)
        squeezed = compressor.compress(plane.data) if gains else plane.tobytes()
        return squeezed if len(squeezed) < plane.nbytes else plane.tobytes()

    planes = [coded.gaps, _by_byte(coded.far), coded.masks, plain.pack_codes(coded.short), _by_byte(coded.big)]
    stored = [smaller(plane) for plane in planes]
    size = sum(part.nbytes for part in coded.body)
    head = _HEAD.pack(coded.far.size, coded.big.size, *map(len, stored), size)
    table = coded.codings.tobytes() + coded.changes.astype("<u4").tobytes()
    return b"".join([head, table, *stored, *(part.data for part in coded.body)])


def unpack(data: bytes | memoryview, block: Block) -> list[Part]:
    """The parts of the coded block in `data`, without skipped segments."""
    view, n = memoryview(data), len(block.segments)
    if len(view) < _HEAD.size + 5 * n:
        raise DeltaError("a block that is too short")
    n_far, n_big, *stored = _HEAD.unpack_from(view)
    codings = np.frombuffer(view, np.uint8, n, _HEAD.size)
    changes = np.frombuffer(view, "<u4", n, _HEAD.size + n)
    _check_table(block, codings, changes)
    steps = int(changes.sum(dtype=np.int64))
    gaps = int(changes[codings == GAPS].sum(dtype=np.int64))
    if n_far > gaps or n_big > steps:
        raise DeltaError("more escapes than changes")
    rows = list(zip(block.segments, codings.tolist(), changes.tolist(), strict=True))
    masks = sum(8 * segment.mask_words for segment, coding, _ in rows if coding == MASK)
    dense = sum(segment.nbytes for segment, coding, _ in rows if coding == DENSE)
    sizes = [gaps, 4 * n_far, masks, -(-steps // 2), 4 * n_big, dense]
    starts = np.cumsum([_HEAD.size + 5 * n, *stored], dtype=np.int64).tolist()
    if starts[-1] != len(view):
        raise DeltaError("a block whose planes do not add up to its size")
    planes = [_plane(view[a:b], size) for (a, b), size in zip(pairwise(starts), sizes, strict=True)]
    bytes_of = [np.frombuffer(plane, np.uint8) for plane in planes]
    short, big = plain.unpack_codes(bytes_of[3], steps), _from_bytes(bytes_of[4])
    far, aligned = _from_bytes(bytes_of[1]), bytes_of[2].copy().view(np.uint64)
    gap_bytes = bytes_of[0].copy()  # the kernels are compiled for arrays that can be written
    if np.count_nonzero(gap_bytes == plain.ESCAPE_GAP) != n_far:
        raise DeltaError("gaps and their escapes do not agree")
    if np.count_nonzero(short == plain.ESCAPE_CODE) != n_big:
        raise DeltaError("codes and their escapes do not agree")
    parts = _parts(rows, gap_bytes, far, aligned, short, big, bytes_of[5])
    for part in parts:
        _check_places(*part)
    return parts


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


def _from_bytes(data: np.ndarray) -> np.ndarray:
    """uint32."""
    return data.reshape(4, -1).T.copy().view(np.uint32).reshape(-1)


def _parts(rows: list[tuple[Segment, int, int]], *planes: np.ndarray) -> list[Part]:
    """Cut the planes gaps, far, masks, short, big and body into the parts of segments."""
    found: list[Part] = []
    starts = [0] * len(planes)

    def take(plane: int, count: int) -> np.ndarray:
        starts[plane] += count
        return planes[plane][starts[plane] - count : starts[plane]]

    for segment, coding, changes in rows:
        if coding == DENSE:
            found.append((segment, coding, (take(5, segment.nbytes),)))
        elif coding != SKIP:
            gaps = take(0, changes) if coding == GAPS else np.empty(0, np.uint8)
            far = take(1, int(np.count_nonzero(gaps == plain.ESCAPE_GAP)))
            where = (gaps, far) if coding == GAPS else (take(2, segment.mask_words),)
            short = take(3, changes)
            big = take(4, int(np.count_nonzero(short == plain.ESCAPE_CODE)))
            found.append((segment, coding, (*where, short, big)))
    return found


def _check_places(segment: Segment, coding: int, planes: tuple[np.ndarray, ...]) -> None:
    """Every place that the planes lead to lies within the segment."""
    wrong = False
    if coding == GAPS:
        gaps, far = planes[:2]
        wrong = int(gaps.sum(dtype=np.int64)) + int(far.sum(dtype=np.int64)) + gaps.size > segment.count
    elif coding == MASK:
        mask, short = planes[:2]
        beyond = int(mask[-1]) >> (segment.count % 64) if segment.count % 64 else 0
        wrong = bool(beyond) or int(np.bitwise_count(mask).sum(dtype=np.int64)) != short.size
    if wrong:
        raise DeltaError(f"changes that do not lie within their segment ({CODINGS[coding]})")
