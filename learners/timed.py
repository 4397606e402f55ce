"""A learner without a model: takes as long as told and publishes bytes that change. For system experiments.

Real processes, real buffer, real sockets, simulated accelerator. No torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from areal_like.types import Batch
from areal_like.weights.state import State, TensorSpec
from learners.batch_metrics import batch_metrics


class TimedLearner:
    """Trains a batch in `base + per_sample · samples + per_token · trained tokens` seconds.

    `weight_bytes` is the size of what `snapshot` returns: one uint8 tensor, different after every train step.
    """

    def __init__(
        self, *, base: float = 0.0, per_sample: float = 0.0, per_token: float = 0.0, weight_bytes: int = 65536
    ):
        self._base, self._per_sample, self._per_token = base, per_sample, per_token
        self._state = State([TensorSpec("weights", "uint8", (weight_bytes,))])
        self._steps = 0

    def train(self, batch: Batch) -> dict[str, Any]:
        """Wait out the batch's cost, bookkeeping included, and return its metrics."""
        deadline = time.monotonic() + self._base
        metrics = batch_metrics(batch)
        deadline += self._per_sample * len(batch.samples) + self._per_token * metrics["tokens"]
        self._steps += 1
        self._stamp()
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(left)
        return metrics

    def _stamp(self) -> None:
        stamp = np.array([self._steps], np.uint64).view(np.uint8)[: self._state.nbytes]
        self._state.buffer[: len(stamp)] = stamp

    def snapshot(self, into: State | None = None, done: Callable[[int], None] | None = None) -> State:
        """A copy of the bytes, in `into` or a buffer that is the caller's to keep."""
        state = into or State(self._state.specs)
        state.buffer[:] = self._state.buffer
        if done:
            done(state.nbytes)
        return state

    def save(self, folder: str) -> None:
        """Write the bytes to `folder/weights.bin`."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "weights.bin").write_bytes(next(self._state.tensors())[1].tobytes())

    def save_state(self, folder: Path) -> None:
        (folder / "learner.json").write_text(json.dumps({"steps": self._steps}))

    def load_state(self, folder: Path) -> None:
        self._steps = json.loads((folder / "learner.json").read_text())["steps"]
        self._stamp()
