"""One publication after another, in a thread beside the learner: compare, encode, keep (ParaBlock, arXiv 2511.19959).

    learner:  cast block 1 │ cast block 2 │ ... │ next train step ...
    thread:                │ encode 1     │ encode 2 │ ... │ digest, keep, announce

The learner stands still only while its weights are cast into a spare buffer, and where the publication before is not
through yet. The thread takes each block as soon as it is cast. Two buffers take turns: what was the newest version is
the base of the next, and then its spare. With `overlap` false the learner waits for the end, and otherwise nothing is
different: the truth that the overlapped order is held against.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from queue import SimpleQueue
from typing import Any, Protocol

from areal_like.weights.codec import Encoder, Lanes, Mode
from areal_like.weights.compiled import kernels_for
from areal_like.weights.delta import Head, write
from areal_like.weights.digest import text_of
from areal_like.weights.history import History
from areal_like.weights.layout import Block, Layout
from areal_like.weights.planes import CODINGS, Coded, pack
from areal_like.weights.state import State

log = logging.getLogger(__name__)
BESIDE_FROM = 1 << 18
"""Bytes of weights; for fewer a thread costs more than it saves."""
ENCODERS = 2
"""Threads that encode blocks side by side."""
STALL_SECONDS = 600.0
"""So long a publication may take before the learner gives up."""

Encoded = tuple[Coded, bytes, float]
"""A block, its bytes, and the seconds that they took."""
Announce = Callable[[dict[str, Any]], None]


class Snapshot(Protocol):
    """`Trainer.snapshot`."""

    def __call__(self, into: State | None = None, done: Callable[[int], None] | None = None) -> State: ...


@dataclass(frozen=True, slots=True)
class Coding:
    """How weights go out; the keys of the config's `weights` say what each means."""

    coding: str = "delta"
    mode: Mode = "ulp"
    dense_above: float = 1.0
    block_bytes: int = 16 << 20
    anchor_every: int = 50
    keep: int = 8
    sweep_every: int = 100
    overlap: bool = True

    @classmethod
    def of(cls, section: Any) -> Coding:
        """Of the config's section, which also has keys that are not the learner's."""
        return cls(**{each.name: section[each.name] for each in fields(cls)})


class Publication:
    """Makes versions known: `publish` is called by the learner, `announce(manifest)` by the thread, version by version;
    they can be fetched at `endpoint`, which whoever serves them sets before the first.
    What goes wrong in the thread is raised in the learner, by its next call."""

    def __init__(self, coding: Coding, announce: Announce):
        self.endpoint = ""
        self._coding, self._announce = coding, announce
        self.history: History | None = None
        self._newest: State | None = None
        self._spare: State | None = None
        self._layout: Layout | None = None
        self._encoders = SimpleQueue[Encoder]()
        self._pool: ThreadPoolExecutor | None = None
        self._lanes: Lanes | None = None
        self._versions = 0
        self._progress = threading.Condition()
        self._cast = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.manifest: dict[str, Any] = {}
        self.metrics: dict[str, float] = {}

    def publish(self, version: int, snapshot: Snapshot) -> float:
        """Take a snapshot and have it published. Returns the seconds for which the learner stood still."""
        begin = time.monotonic()
        self.wait()
        if self._newest is None or self.history is None:
            self._make_known(version, self._whole(snapshot()))
            return time.monotonic() - begin
        state = self._spare or State(self._newest.specs)
        self.history.release(state)
        if self._coding.overlap and state.nbytes >= BESIDE_FROM:
            self._publish_beside(version, state, snapshot)
        else:
            self._make_known(version, self._whole(snapshot(into=state)))
        return time.monotonic() - begin

    def _publish_beside(self, version: int, state: State, snapshot: Snapshot) -> None:
        self._cast = 0
        self._thread = threading.Thread(target=self._run, args=(version, state), name="publication", daemon=True)
        self._thread.start()
        try:
            snapshot(into=state, done=self._is_cast)
        finally:
            self._is_cast(state.nbytes)

    def _whole(self, state: State) -> State:
        self._cast = state.nbytes
        return state

    def wait(self) -> None:
        """Until what was published is announced. Raises what went wrong in the thread."""
        if self._thread:
            self._thread.join(STALL_SECONDS)
            if self._thread.is_alive():
                raise TimeoutError(f"a publication of weights has not ended within {STALL_SECONDS:.0f} s")
            self._thread = None
        if self._error:
            raise self._error

    def _is_cast(self, nbytes: int) -> None:
        with self._progress:
            self._cast = nbytes
            self._progress.notify_all()

    # ---- in the thread, if there is one ----------------------------------------------------------------------------

    def _run(self, version: int, state: State) -> None:
        try:
            self._make_known(version, state)
        except BaseException as error:
            self._error = error

    def _make_known(self, version: int, state: State) -> None:
        if self.history is None:
            layout = Layout(state.specs, self._coding.block_bytes)
            self._layout = layout
            several = self._coding.overlap and kernels_for(layout.nbytes) is not None
            self._pool = ThreadPoolExecutor(ENCODERS, "encoding") if several else None
            for _ in range(ENCODERS if several else 1):
                self._encoders.put(Encoder(layout, self._coding.mode, self._coding.dense_above))
            self._lanes = Lanes(layout, state.words)
            self.history = History(layout, keep=self._coding.keep, anchor_every=self._coding.anchor_every)
            digest, message = text_of(self._lanes.total(), state.words.size), None
        elif self._coding.coding == "delta":
            digest, message = self._encoded(version, state)
        else:
            self._wait_for(state.nbytes)
            digest, message = state.digest(), None
        self.history.add(version, digest, state, message)
        self._newest, self._spare = state, self._newest
        self._versions += 1
        if (
            self._coding.coding == "delta"
            and self._versions % self._coding.sweep_every == 0
            and state.digest() != digest
        ):
            raise RuntimeError(f"the digest of version {version} is not that of its bits")
        tensors = [[spec.name, spec.dtype, list(spec.shape)] for spec in state.specs]
        self.manifest = {
            "version": version,
            "digest": digest,
            "bytes": state.nbytes,
            "tensors": tensors,
            "block_bytes": self._coding.block_bytes,
            "endpoint": self.endpoint,
        }
        self._announce(self.manifest)

    def _wait_for(self, nbytes: int) -> None:
        """Until the learner has cast so much."""
        with self._progress:
            while self._cast < nbytes:
                if not self._progress.wait(STALL_SECONDS):
                    raise TimeoutError("the learner has not cast its weights")

    def _each(self, call: Callable[[Block], Encoded], blocks: Sequence[Block]) -> Iterable[Encoded]:
        """The results for all blocks, in order; of large weights several at a time, for kernels need no interpreter."""
        return self._pool.map(call, blocks) if self._pool else map(call, blocks)

    def _encoded(self, version: int, state: State) -> tuple[str, bytes]:
        """Digest and message of the step from the newest version to `state`."""
        assert self._layout and self._newest and self._lanes and self.history
        layout, base, lanes = self._layout, self._newest.buffer, self._lanes
        seconds, blocks, codeds, changes = 0.0, [], Counter[str](), 0

        def encode(block: Block) -> Encoded:
            self._wait_for(block.stop)
            encoder, begin = self._encoders.get(), time.monotonic()
            coded = encoder.encode(block, base, state.buffer, lanes)
            packed = pack(coded)  # before the encoder's memory is used again
            self._encoders.put(encoder)
            return coded, packed, time.monotonic() - begin

        for block, (coded, packed, taken) in zip(layout.blocks, self._each(encode, layout.blocks), strict=True):
            blocks.append(packed)
            _count(codeds, coded, [segment.nbytes for segment in block.segments])
            changes += int(coded.changes.sum(dtype="int64"))
            seconds += taken
        digest = text_of(self._lanes.total(), state.words.size)
        head = Head(self.history.version, version, self.history.digest, digest, self._coding.mode)
        message = write(head, layout, blocks)
        elements = sum(segment.count for block in layout.blocks for segment in block.segments if not segment.plain)
        self.metrics = {
            "publish/delta_bytes": len(message),
            "publish/ratio": state.nbytes / len(message),
            "publish/density": changes / max(1, elements),
            "publish/encode_seconds": seconds,
            **{f"publish/share_{name}": codeds[name] / max(1, state.nbytes) for name in CODINGS},
        }
        return digest, message


def _count(into: Counter[str], coded: Coded, sizes: list[int]) -> None:
    """Bytes of weights per coding."""
    for coding, nbytes in zip(coded.codings.tolist(), sizes, strict=True):
        into[CODINGS[coding]] += nbytes
