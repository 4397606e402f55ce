"""A follower of published weights: a state, its version, and the lanes of its digest.

    nothing held ──base snapshot──► version a ──delta──► version v ──delta──► ...      anything wrong ──► nothing held

All parts reach a version together, each by its own route. The replica reads and checks all messages of an update before
it applies the first. It applies a delta only to the bits that it was made from, and compares the digests of its part
and of the whole. On a mismatch it raises `Desync`, and holds nothing until it gets whole weights. No I/O."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal_like.weights import plain
from areal_like.weights.codec import Lanes
from areal_like.weights.delta import Delta, Message, advance, read
from areal_like.weights.digest import text_of
from areal_like.weights.layout import Layout, Segment
from areal_like.weights.planes import GAPS, DeltaError
from areal_like.weights.state import ALIGN, State, TensorSpec

NOTHING = -1
"""The version of a replica that holds no weights."""
SINGLY_BELOW = 1 / 32
"""Up to this share of changed elements they are written one by one: 10 ns each, against 0.25 ns in a row."""

Where = slice | np.ndarray
"""Elements of a tensor, flat: a slice, or places int64."""


@dataclass(slots=True)
class Changes:
    """Since the weights with the digest `since`: for each tensor that has changed (by its place in the table) where;
    and elements of a state on a device: bytes of one, and their places int64 [n] in the whole state, there."""

    since: str
    tensors: dict[int, list[Where]] = field(default_factory=lambda: defaultdict(list))
    places: list[tuple[int, Any]] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        for segment, coding, planes in (part for block in delta.blocks for part in block):
            singly = coding == GAPS and planes[0].size <= segment.count * SINGLY_BELOW
            self.note(segment, plain.places_of(*planes[:2]) + segment.first if singly else None)

    def note(self, segment: Segment, where: Where | None) -> None:
        """Add elements of the segment's tensor, or the whole segment."""
        stretch = slice(segment.first, segment.first + segment.count)
        self.tensors[segment.tensor].append(stretch if where is None else where)


@dataclass(frozen=True, slots=True)
class Update:
    """Verified weights. An engine that holds those of `changes.since` may write only `changes`."""

    version: int
    digest: str
    state: State
    changes: Changes | None = None


class Desync(Exception):
    """An update that can't be applied here; `reason` is a word or two, for counting."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Route:
    """The data that brings one part forward: deltas, after `base_snapshot` (a version, already in the state)."""

    base_snapshot: int | None
    messages: Sequence[Message]


class _Part:
    """State of a part of the weights: `version`, with the lanes and the digest of its bits."""

    def __init__(self, layout: Layout, lanes: Any):
        self.layout = layout
        self.begin(NOTHING, lanes)

    def begin(self, version: int, lanes: Any) -> None:
        """Its bits were written, and have these lanes."""
        self.version, self.lanes = version, lanes
        self.digest = text_of(self.lanes.total(), self.layout.nbytes // 8)


class Replica:
    """Begins with nothing, or with `state`: the version whose digest is that of its bits."""

    def __init__(self, state: State | None = None):
        self.digest = ""
        self._initial = state
        self._parts: list[_Part] = []
        self._changes: Changes | None = None
        self.state, self.layouts = State([]), list[Layout]()

    @property
    def version(self) -> int:
        """The version that all parts have; NOTHING if they differ."""
        versions = {part.version for part in self._parts}
        return versions.pop() if len(versions) == 1 else NOTHING

    def held(self, part: int) -> tuple[int, str]:
        held = self._parts[part]
        return held.version, "" if held.version == NOTHING else held.digest

    def shape(self, specs: list[TensorSpec], block_bytes: int, parts: int = 1) -> None:
        """Set the tensors, blocks and parts of the weights to come. What is held is kept if it fits."""
        if len(self.layouts) == parts and (self.layouts[0].specs, self.layouts[0].block_bytes) == (specs, block_bytes):
            return
        self.layouts = [Layout(specs, block_bytes, part, parts) for part in range(parts)]
        if self._initial is not None and self._initial.specs == specs:
            self.state = self._initial
        elif self.state.specs != specs:
            self.state = self._empty(specs)
        self._initial = None
        self._parts = [_Part(layout, self._lanes(layout)) for layout in self.layouts]
        self.digest = self._digest()
        self._changes = Changes(self.digest)

    def forget(self, part: int | None = None) -> None:
        """The memory of the weights, or of one part of them, may then be overwritten."""
        for each in self._parts if part is None else [self._parts[part]]:
            each.version = NOTHING
        self.digest, self._changes = "", None

    def same_bits(self, version: int, digest: str) -> bool:
        """Are these bits already held? They then count as that version."""
        same = bool(digest) and digest == self.digest
        for part in self._parts if same else ():
            part.version = version
        return same

    def take(self, routes: Sequence[Route], version: int, digest: str) -> None:
        """Advance to a version with that digest, each part by its route. Raises Desync."""
        try:
            pairs = list(zip(self._parts, routes, strict=True))
            deltas = [[read(message, part.layout) for message in route.messages] for part, route in pairs]
            for (part, route), steps in zip(pairs, deltas, strict=True):
                if route.base_snapshot is not None:
                    part.begin(route.base_snapshot, self._lanes(part.layout))
                for delta in steps:
                    self._advance(part, delta)
            self.digest = self._digest()
            if (self.version, self.digest) != (version, digest):
                raise Desync("wrong digest", f"of version {version}: here is {self.version}")
        except BaseException as error:
            self.forget()
            if isinstance(error, DeltaError):
                raise Desync("broken delta", str(error)) from None
            raise

    def _advance(self, part: _Part, delta: Delta) -> None:
        head = delta.head
        if (head.base, head.base_digest) != (part.version, part.digest):
            raise Desync("wrong base", f"a delta from version {head.base}, and here is {part.version}")
        part.version, part.digest = NOTHING, self._apply(delta, part.layout, part.lanes)
        if part.digest != head.digest:
            raise Desync("wrong digest", f"after the delta from version {head.base} to {head.version}")
        part.version = head.version

    # Of a state in main memory; `areal_like.weights.device` has that of others

    def _empty(self, specs: list[TensorSpec]) -> State:
        return State(specs)

    def _lanes(self, layout: Layout) -> Any:
        return Lanes(layout, self.state.words)

    def _apply(self, delta: Delta, layout: Layout, lanes: Any) -> str:
        """Advance the state, its lanes and `_changes`; returns the layout's new digest."""
        digest = advance(delta, layout, self.state, lanes)
        if self._changes:
            self._changes.add(delta)
        return digest

    def changes(self) -> Changes | None:
        """Changes since the last call, relative to the bits held then; None: anything may have changed."""
        changes, self._changes = self._changes, Changes(self.digest)
        return changes

    def sweep(self) -> bool:
        """Does the incrementally updated digest match the bits? If not, discard the weights."""
        right = self.state.digest() == self.digest
        if not right:
            self.forget()
        return right

    def _digest(self) -> str:
        lanes = sum((part.lanes.total() for part in self._parts), np.zeros(2, np.uint64))
        return text_of(lanes, self.state.nbytes // ALIGN)
