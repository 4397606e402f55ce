"""Weights & Biases. Its own settings count: WANDB_MODE=offline, WANDB_PROJECT, WANDB_API_KEY, WANDB_ENTITY."""

import hashlib
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

import wandb

from areal_like.interfaces import Tracked
from areal_like.run.metrics import numbers

INIT_SECONDS = 60.0


class WeightsAndBiases:
    """A run whose id follows from its folder, so that a resumed run goes on in the same place."""

    def __init__(self, run: Tracked):
        identity = hashlib.sha256(str(run.folder.resolve()).encode()).hexdigest()[:16]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", run.project),
            name=run.name,
            id=identity,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
            settings=wandb.Settings(
                init_timeout=INIT_SECONDS, silent=True, console="off", disable_git=True, x_disable_stats=True
            ),
        )
        folder = Path(self._run.dir).parent
        self.where = f"wandb sync {shlex.quote(str(folder))}" if self._run.offline else str(self._run.url)
        # A resumed run makes some steps again: the step is a number like others, not the count of calls.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add(self, row: Mapping[str, object]) -> None:
        self._run.log(numbers(row))

    def end(self, summary: Mapping[str, object] | None) -> None:
        self._run.summary.update(dict(summary or {}))
        code = 1 if summary is None else 0
        self._run.finish(exit_code=code)
        wandb.teardown(code)  # `finish` returns before the file of an offline run is whole
