"""Weights out: encodes, keeps and announces each version, in a thread beside the learner (ParaBlock, arXiv 2511.19959).

The learner waits only while it casts its weights into a spare buffer, or while the previous publication still runs. The
thread takes each block as soon as it is cast. Two buffers take turns: the newest version is the base of the next, then
its spare. Weights on a GPU are compared there with the last published bits, which they overwrite: only changes come to
the host (`areal_like.weights.device`). With `overlap: false` the learner waits until the end.

Each rank of a learner does this with its own part of the weights, and serves it. When all parts of a version can be
fetched, the ranks exchange lanes, which add up to the digest of the whole, and the first rank announces it. No process
holds more than its part.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np

from areal_like.weights.delta import DeltaHead, write
from areal_like.weights.digest import text_of
from areal_like.weights.history import History
from areal_like.weights.layout import Layout
from areal_like.weights.server import WeightServer
from areal_like.weights.state import ALIGN, State
from areal_like.wire.messages import Manifest
from learners.encoding import BROKEN_OFF, STALL_SECONDS, CastProgress, PartEncoder, metrics_of

BESIDE_FROM = 1 << 18
"""Above this many bytes of weights a thread pays off."""
Announce = Callable[[Manifest], None]
TakeSnapshot = Callable[..., State]
"""`Trainer.snapshot`."""


class PartReport(msgspec.Struct):
    """A part that can be fetched at `endpoint`: the lanes of its bits, the bytes that its server has sent so far, and,
    if it is a delta, numbers that add up over parts. `error` is the reason why it cannot be fetched."""

    endpoint: str = ""
    lanes: list[int] = []
    sent: int = 0
    counts: dict[str, int] = {}
    error: str = ""


class Alone:
    """The only rank. `learners.follower.OtherRanks` stands for the ranks that publish the other parts."""

    def begin(self, version: int) -> None:
        """Make the other ranks publish their parts of this version."""

    def gathered(self, report: PartReport) -> list[PartReport]:
        """The reports of all parts, by part. Called once per version, by the thread."""
        return [report]


@dataclass(frozen=True, slots=True)
class Coding:
    """How weights go out; the keys of the config's `weights` say what each means."""

    block_bytes: int = 16 << 20
    snapshot_every: int = 50
    keep: int = 8
    sweep_every: int = 100
    overlap: bool = True

    @classmethod
    def of(cls, section: Any) -> Coding:
        return cls(**{each.name: section[each.name] for each in fields(cls)})


class Publisher:
    """Serves weights on `endpoint`, with `keys` (`areal_like.wire.keys`) to those on the allow-list. Its thread calls
    `announce(manifest)` for every version as soon as all of it can be fetched. `others` are the ranks with the other
    parts. An error in the thread is raised by the learner's next call."""

    def __init__(
        self,
        endpoint: str,
        coding: Coding,
        announce: Announce,
        keys: str | None = None,
        others: Alone | None = None,
    ):
        self._coding, self._announce, self._others = coding, announce, others or Alone()
        self._server = WeightServer(endpoint, keys, lambda part: self._history if part == self._part else None)
        self.endpoint = self._server.endpoint
        self._history: History | None = None
        self._newest: State | None = None
        self._spare: State | None = None
        self._encoder: PartEncoder | None = None
        self._part = self._versions = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._manifest: Manifest | None = None
        self._metrics: dict[str, float] = {}
        self._sent_by_others = 0

    def publish(self, version: int, snapshot: TakeSnapshot) -> float:
        """Publish this rank's part of the weights, which `snapshot` returns, as `version`. Returns the seconds of
        waiting."""
        begin = time.monotonic()
        self._join()
        self._others.begin(version)
        state, cast = self._free_state(), CastProgress()
        if state and self._coding.overlap and state.nbytes >= BESIDE_FROM:
            self._thread = threading.Thread(
                target=self._run, args=(version, state, cast), name="publication", daemon=True
            )
            self._thread.start()
            try:
                snapshot(into=state, done=cast.reach)
            except BaseException:
                cast.reach(BROKEN_OFF)
                raise
            cast.reach(state.nbytes)
        else:
            state = snapshot(into=state)
            cast.reach(state.nbytes)
            self._make_known(version, state, cast)
        return time.monotonic() - begin

    def wait(self) -> Manifest:
        """Wait until the last version is announced; returns its manifest. Raises an error of the thread."""
        self._join()
        assert self._manifest
        return self._manifest

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the newest announced version. `publish/bytes` counts everything sent so far."""
        return {"publish/bytes": self._server.bytes_sent + self._sent_by_others, **self._metrics}

    def close(self) -> None:
        self._server.close()

    def _join(self) -> None:
        if self._thread:
            self._thread.join(STALL_SECONDS)
            if self._thread.is_alive():
                raise TimeoutError(f"publishing weights took longer than {STALL_SECONDS:.0f} s")
            self._thread = None
        if self._error:
            raise self._error

    def _free_state(self) -> State | None:
        if not self._newest or not self._history:
            return None
        newest = self._newest
        state = newest if newest.in_place else self._spare or State(newest.specs, part=newest.part, parts=newest.parts)
        self._history.release(state)
        return state

    # ---- in the thread, if there is one ----------------------------------------------------------------------------

    def _run(self, version: int, state: State, cast: CastProgress) -> None:
        try:
            self._make_known(version, state, cast)
        except BaseException as error:
            self._error = error

    def _make_known(self, version: int, state: State, cast: CastProgress) -> None:
        try:
            report = self._added(version, state, cast)
        except Exception as error:
            self._others.gathered(PartReport(error=f"{type(error).__name__}: {error}"))  # they wait for this part
            raise
        reports = self._others.gathered(report)
        for part, each in enumerate(reports):
            if each.error:
                raise RuntimeError(f"part {part} of version {version} was not published: {each.error}")
        nbytes = sum(spec.space for spec in state.specs)
        lanes = np.array([each.lanes for each in reports], np.uint64).sum(axis=0, dtype=np.uint64)
        self._metrics = metrics_of(sum((Counter(each.counts) for each in reports), Counter()), nbytes)
        self._sent_by_others = sum(each.sent for each in reports) - report.sent
        self._manifest = Manifest(
            version,
            text_of(lanes, nbytes // ALIGN),
            nbytes,
            [(spec.name, spec.dtype, list(spec.shape)) for spec in state.specs],
            self._coding.block_bytes,
            [each.endpoint for each in reports],
        )
        self._announce(self._manifest)

    def _added(self, version: int, state: State, cast: CastProgress) -> PartReport:
        counts, message = Counter[str](), None
        if self._encoder is None or self._history is None or self._newest is None:  # the first version
            layout = Layout(state.specs, self._coding.block_bytes, state.part, state.parts, apart=True)
            self._part, self._encoder = state.part, PartEncoder(layout, state, self._coding.overlap)
            self._history = History(layout, keep=self._coding.keep, snapshot_every=self._coding.snapshot_every)
            lanes = self._encoder.lanes.total()
            digest = text_of(lanes, state.nbytes // ALIGN)
        else:
            blocks, counts = self._encoder.encode(self._newest, state, cast)
            lanes = self._encoder.lanes.total()
            digest = text_of(lanes, state.nbytes // ALIGN)
            head = DeltaHead(self._history.version, version, self._history.digest, digest)
            message = write(head, self._encoder.layout, blocks)
            counts["delta_bytes"] = len(message)
        self._history.add(version, digest, state, message)
        self._newest, self._spare = state, self._newest
        self._versions += 1
        if self._versions % self._coding.sweep_every == 0 and not np.array_equal(state.lanes(), lanes):
            raise RuntimeError(f"the digest of version {version} is not that of its bits")
        return PartReport(self.endpoint, lanes.tolist(), self._server.bytes_sent, dict(counts))
