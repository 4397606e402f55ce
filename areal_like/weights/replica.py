"""One who follows published weights: a state, the version that it holds, and the lanes of its digest.

    nothing held ──anchor──► version a ──delta──► version v ──delta──► ...      anything wrong ──► nothing held

All messages of an update are read and checked before the first is applied; a delta is applied only to the very bits
that it was made from, and the digest is compared after each. When something does not fit, `Desync` says what, and the
replica holds nothing until it is given whole weights: there is no way on from doubtful bits. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_like.weights.changes import Changes
from areal_like.weights.codec import Lanes
from areal_like.weights.delta import DeltaError, advance, read
from areal_like.weights.digest import text_of
from areal_like.weights.layout import Layout
from areal_like.weights.state import State, TensorSpec

Message = bytes | bytearray | memoryview
NOTHING = -1
"""In place of a version."""


class Desync(Exception):
    """An update that can't be applied here; `reason` is a word or two, for counting."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Replica:
    """Begins with `state`, the bits of which belong to whatever version has their digest, or with nothing."""

    def __init__(self, state: State | None = None):
        self.version, self.digest = NOTHING, ""
        self._initial = state
        self._lanes: Lanes | None = None
        self._changes: Changes | None = None
        self.state, self.layout = State([]), Layout([], 4096)

    def shape(self, specs: list[TensorSpec], block_bytes: int) -> None:
        """The weights to come have these tensors and blocks. What is held is kept if it fits."""
        if self._lanes is not None and (self.layout.specs, self.layout.block_bytes) == (specs, block_bytes):
            return
        self.forget()
        self.layout = Layout(specs, block_bytes)
        if self._initial is not None and self._initial.specs == specs:
            self.state = self._initial
        elif self.state.specs != specs:
            self.state = State(specs)
        self._initial = None
        self._lanes = Lanes(self.layout, self.state.words)
        self.digest = self._digest()
        self._changes = Changes(self.digest)

    def forget(self) -> None:
        """Hold nothing; the memory may then be written to."""
        self.version, self.digest, self._changes = NOTHING, "", None

    def same_bits(self, version: int, digest: str) -> bool:
        """Are these bits already here? Then they count as that version from now on."""
        if not digest or digest != self.digest:
            return False
        self.version = version
        return True

    def take(self, anchor: int | None, messages: Sequence[Message], version: int, digest: str) -> None:
        """Go on by deltas to a version with that digest; first, with `anchor`, from that version, whose bits have been
        written to `state.buffer`. Raises Desync."""
        assert self._lanes is not None
        try:
            deltas = [read(message, self.layout) for message in messages]
            if anchor is not None:
                self._lanes = Lanes(self.layout, self.state.words)
                self.version, self.digest = anchor, self._digest()
            for delta in deltas:
                head = delta.head
                if (head.base, head.base_digest) != (self.version, self.digest):
                    raise Desync("wrong base", f"a delta from version {head.base}, and here is {self.version}")
                self.version = NOTHING
                self.digest = advance(delta, self.layout, self.state, self._lanes)
                if self._changes:
                    self._changes.add(delta, self.layout)
                if self.digest != head.digest:
                    raise Desync("wrong digest", f"after the delta from version {head.base} to {head.version}")
                self.version = head.version
            if (self.version, self.digest) != (version, digest):
                raise Desync("wrong digest", f"of version {version}: here is {self.version}")
        except DeltaError as error:
            self.forget()
            raise Desync("broken delta", str(error)) from None
        except BaseException:
            self.forget()
            raise

    def changes(self) -> Changes | None:
        """What has changed since this was last asked, or whatever else was then held; None: it may be anything."""
        changes, self._changes = self._changes, Changes(self.digest)
        return changes

    def sweep(self) -> bool:
        """Is the digest that was kept up to date that of the bits which are there now? If not, nothing is held."""
        right = self.state.digest() == self.digest
        if not right:
            self.forget()
        return right

    def _digest(self) -> str:
        assert self._lanes is not None
        return text_of(self._lanes.total(), self.state.words.size)
