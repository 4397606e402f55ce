"""Which samples of a train step are kept for people to read, with what the learner computed for their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from areal_like.config.schema import Run
from areal_like.run.samples import TRAINED, TRAINED_SHARE, SampleLog, kept
from areal_like.types import Batch, Group

Numbers = Callable[[int], Sequence[Mapping[str, np.ndarray]]]
"""Id of a group of the batch that was trained last → for each sample, name → float [R]."""


class TrainedSamples:
    """One group per train step (`chosen`). `folder` is the run's; `done`: train steps before a resume."""

    def __init__(self, folder: Path, run: Run, done: int):
        most = TRAINED_SHARE * run.samples_bytes
        self._log = SampleLog(folder, TRAINED, steps=run.steps, most=most, done=done) if most else None

    def keep(self, batch: Batch, step: int, numbers: Numbers | None) -> None:
        """`step`: train steps made, this one included."""
        if self._log is None or self._log.room(step) <= 0 or not batch.groups:
            return
        group = chosen(batch)
        found = (numbers(group.id) if numbers else []) or [{}] * len(group.samples)
        for index, (sample, values) in enumerate(zip(group.samples, found, strict=True)):
            place = (group.id, index)
            record = kept(TRAINED, step, batch.version, place, sample, actor=group.actor, numbers=values)
            if not self._log.write(record):
                return


def chosen(batch: Batch) -> Group:
    """A group of the batch: in turn a random one, and that with the best sample."""
    if batch.index % 2 == 0:
        return batch.groups[int(np.random.default_rng(batch.index).integers(len(batch.groups)))]
    return max(batch.groups, key=lambda group: max(sample.reward for sample in group.samples))
