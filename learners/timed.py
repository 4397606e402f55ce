"""A learner without a model or torch, for system experiments: sleeps for a set time and publishes changing bytes."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from areal_like.types import Batch
from areal_like.weights.state import State, TensorSpec
from learners.batch_metrics import batch_metrics


class TimedLearner:
    """Trains a batch in `base + per_sample · samples + per_token · trained tokens` seconds.

    `weight_bytes`: size of the snapshot, one uint8 tensor that differs after every train step.
    """

    def __init__(
        self,
        *,
        base: Annotated[float, "[0, 1e7]"] = 0.0,
        per_sample: Annotated[float, "[0, 1e7]"] = 0.0,
        per_token: Annotated[float, "[0, 1e7]"] = 0.0,
        weight_bytes: Annotated[int, "[1, inf)"] = 65536,
    ):
        self._steps = 0
        self._base, self._per_sample, self._per_token = base, per_sample, per_token
        self._state = State([TensorSpec("weights", "uint8", (weight_bytes,))])

    def train(self, batch: Batch) -> dict[str, Any]:
        """Wait out the batch's cost, bookkeeping included, and return its metrics."""
        begin, metrics = time.monotonic(), batch_metrics(batch)
        self._restore(self._steps + 1)
        end = begin + self._base + self._per_sample * len(batch.samples) + self._per_token * metrics["tokens"]
        while (left := end - time.monotonic()) > 0:
            time.sleep(left)
        return metrics

    def _restore(self, steps: int) -> None:
        """The state after so many train steps: their number is in the bytes."""
        self._steps = steps
        stamp = np.array([steps], np.uint64).view(np.uint8)[: self._state.nbytes]
        self._state.buffer[: len(stamp)] = stamp

    def snapshot(self, into: State | None = None, done: Callable[[int], None] | None = None) -> State:
        """A copy of the bytes, in `into` or in a new buffer of the caller's."""
        state = into or State(self._state.specs)
        state.buffer[:] = self._state.buffer
        if done:
            done(state.nbytes)
        return state

    def save(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "weights.bin").write_bytes(next(self._state.tensors())[1].tobytes())

    def save_state(self, folder: Path) -> None:
        (folder / "learner.json").write_text(json.dumps({"steps": self._steps}), encoding="utf-8")

    def load_state(self, folder: Path) -> None:
        self._restore(json.loads((folder / "learner.json").read_bytes())["steps"])
