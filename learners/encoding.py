"""Encodes one part of the weights, block by block, while the learner still casts later blocks."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from areal_like.weights.codec import Encoder, Lanes
from areal_like.weights.digest import kernels_for
from areal_like.weights.layout import Block, Layout
from areal_like.weights.planes import Coded, pack
from areal_like.weights.state import State

ENCODERS = 2
"""Threads that encode blocks side by side."""
STALL_SECONDS = 600.0
"""Seconds after which learner and encoder give up on each other."""
BROKEN_OFF = -1
"""Stands for a count of cast bytes: the learner failed, no more will come."""


class CastProgress:
    """How many bytes of one version the learner has cast."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._cast = 0

    def reach(self, nbytes: int) -> None:
        with self._changed:
            self._cast = nbytes
            self._changed.notify_all()

    def wait_for(self, nbytes: int) -> None:
        """Wait until that many bytes are cast. Raises RuntimeError if they never will be."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._cast >= nbytes or self._cast == BROKEN_OFF, STALL_SECONDS):
                raise TimeoutError("the learner has not cast its weights")
            if self._cast == BROKEN_OFF:
                raise RuntimeError("the learner could not cast its weights")


class PartEncoder:
    """Encodes the steps from one version of a part to the next. `state` is the first version; `overlap` allows several
    threads, which large weights use: kernels need no interpreter. A state on a device finds its changes itself."""

    def __init__(self, layout: Layout, state: Any, overlap: bool):
        several = overlap and kernels_for(layout.nbytes) is not None
        self._pool = ThreadPoolExecutor(ENCODERS, "encoding") if several else None
        self._encoders = SimpleQueue[Encoder]()
        for _ in range(0 if state.in_place else ENCODERS if several else 1):
            self._encoders.put(Encoder(layout))
        self.layout = layout
        self.lanes: Any = state.follow(layout) if state.in_place else Lanes(layout, state.words)

    def encode(self, base: State, state: Any, cast: CastProgress) -> tuple[list[bytes], Counter[str]]:
        """The packed blocks from `base` to `state`, each encoded once cast, and counts. `lanes` become `state`'s."""

        def encoded(block: Block) -> tuple[Coded, bytes, float]:
            cast.wait_for(block.end)
            encoder, begin = None if state.in_place else self._encoders.get(), time.monotonic()
            coded = encoder.encode(block, base.buffer, state.buffer, self.lanes) if encoder else state.coded(block)
            packed = pack(coded)  # before the encoder's memory is used again
            if encoder:
                self._encoders.put(encoder)
            return coded, packed, time.monotonic() - begin

        packs, counts = list[bytes](), Counter[str]()
        run = self._pool.map if self._pool else map
        for block, (coded, packed, taken) in zip(self.layout.blocks, run(encoded, self.layout.blocks), strict=True):
            packs.append(packed)
            counts["elements"] += sum(segment.count for segment in block.segments if not segment.plain)
            counts["changes"] += int(coded.changes.sum(dtype="int64"))
            counts["nanoseconds"] += int(1e9 * taken)
        return packs, counts


def metrics_of(counts: Counter[str], nbytes: int) -> dict[str, float]:
    """Metrics of a version of `nbytes` bytes that was sent as deltas; empty for other versions."""
    if not counts["delta_bytes"]:
        return {}
    return {
        "publish/delta_bytes": counts["delta_bytes"],
        "publish/ratio": nbytes / counts["delta_bytes"],
        "publish/density": counts["changes"] / max(1, counts["elements"]),
        "publish/encode_seconds": counts["nanoseconds"] / 1e9,
    }
