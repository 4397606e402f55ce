"""One message that leads from one version's weights to another's: a head, and the coded blocks of `planes`, of one
part. The head names both versions, their digests and the layout. Steps must be applied exactly once: the receiver
checks first that it holds the bits of `base`, and digests afterwards. `read` checks everything before a write: applying
cannot fail half-way."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from areal_like.weights.codec import Lanes, apply
from areal_like.weights.digest import text_of
from areal_like.weights.layout import Layout
from areal_like.weights.planes import DeltaError, Part, unpack
from areal_like.weights.state import State

Message = bytes | bytearray | memoryview
MAGIC = b"ALD2"
_HEAD = struct.Struct("<4sqq16s16sQI")
OVERHEAD = 64
"""Bytes; see `largest`."""


@dataclass(frozen=True, slots=True)
class DeltaHead:
    base: int
    version: int
    base_digest: str
    digest: str


@dataclass(frozen=True, slots=True)
class Delta:
    head: DeltaHead
    blocks: Sequence[Sequence[Part]]


def write(head: DeltaHead, layout: Layout, blocks: Sequence[bytes]) -> bytes:
    digests = (bytes.fromhex(each) for each in (head.base_digest, head.digest))
    start = _HEAD.pack(MAGIC, head.base, head.version, *digests, layout.key, len(blocks))
    sizes = struct.pack(f"<{len(blocks)}Q", *map(len, blocks))
    return b"".join([start, sizes, *blocks])


def ends_of(data: Message) -> tuple[int, str]:
    """Version and digest after a delta that was checked before."""
    _, _, version, _, digest, _, _ = _HEAD.unpack_from(data)
    return version, digest.hex()


def read(data: Message, layout: Layout) -> Delta:
    """Raises DeltaError unless this is a delta of weights with this layout, whole and sound."""
    view = memoryview(data).cast("B")
    if len(view) < _HEAD.size:
        raise DeltaError("a delta that is too short")
    magic, base, version, base_digest, digest, key, count = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise DeltaError("not a delta")
    if key != layout.key or count != len(layout.blocks):
        raise DeltaError("a delta of weights with other tensors, or cut into other blocks")
    at = _HEAD.size + 8 * count
    if len(view) < at:
        raise DeltaError("a delta that is too short")
    ends = list(accumulate(struct.unpack_from(f"<{count}Q", view, _HEAD.size), initial=at))
    if ends[-1] != len(view):
        raise DeltaError("a delta whose blocks do not add up to its size")
    pieces = [view[start:end] for start, end in pairwise(ends)]
    blocks = [unpack(piece, block) for piece, block in zip(pieces, layout.blocks, strict=True)]
    return Delta(DeltaHead(base, version, base_digest.hex(), digest.hex()), blocks)


def largest(layout: Layout) -> int:
    """An upper limit of a delta's size in bytes: a coding is used only where it is shorter than the bits."""
    segments = sum(len(block.segments) for block in layout.blocks)
    return 2 * layout.nbytes + OVERHEAD * (1 + len(layout.blocks) + segments)


def advance(delta: Delta, layout: Layout, state: State, lanes: Lanes) -> str:
    """Apply a checked delta; returns the new digest. The caller has compared the base."""
    for parts in delta.blocks:
        apply(parts, state.buffer, lanes)
    return text_of(lanes.total(), layout.nbytes // 8)
