"""MLflow. Its own settings count: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, MLFLOW_TRACKING_TOKEN."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from mlflow.entities import Metric, Param, RunStatus
from mlflow.tracking import MlflowClient
from mlflow.utils.time import get_current_time_millis

from areal_like.trackers.interface import Shown, Tracked, numbers

IDENTITY = "mlflow.json"
BY_STALENESS, WHOLE = "staleness_", "whole"
LONGEST = 6000
"""Characters of a parameter's value that every store takes."""


class Mlflow:
    """A run of its own; a resumed one goes on in the run that RUN/mlflow.json names."""

    def __init__(self, run: Tracked):
        self._client = MlflowClient()
        self.where = f"mlflow ui --backend-store-uri {self._client.tracking_uri}"
        known = run.folder / IDENTITY
        if run.resumed and known.is_file():
            self._id = json.loads(known.read_text())["run_id"]
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.project)
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        self._id = self._client.create_run(number, run_name=run.name).info.run_id
        known.write_text(json.dumps({"run_id": self._id}) + "\n")
        settings = [Param(key, str(value)[:LONGEST]) for key, value in run.settings.items()]
        for first in range(0, len(settings), 100):  # as many as one call may bring
            self._client.log_batch(self._id, params=settings[first : first + 100])

    def add(self, row: Mapping[str, object]) -> None:
        found, now = numbers(row), get_current_time_millis()
        step = int(found["step"])
        self._client.log_batch(self._id, [Metric(_allowed(key), value, now, step) for key, value in found.items()])

    def show(self, step: int, samples: Sequence[Shown]) -> None:
        if samples:
            name = f"samples/{samples[0].source}/step-{step:08}.json"
            self._client.log_text(self._id, json.dumps([asdict(each) for each in samples], indent=2), name)

    def end(self, summary: Mapping[str, object] | None) -> None:
        if summary is not None:
            self._client.log_dict(self._id, dict(summary), "summary.json")
        status = RunStatus.KILLED if summary is None else RunStatus.FINISHED
        self._client.set_terminated(self._id, RunStatus.to_string(status))


def _allowed(key: str) -> str:
    """MLflow takes letters, digits and a few signs. What stands before a slash is a folder in its file store, so no
    metric may be called as a group is: there are `loss` and `loss/ratio/mean`, `entropy` and `entropy/staleness_0`."""
    group, _, rest = key.partition("/")
    if not rest or rest.startswith(BY_STALENESS):
        group, rest = WHOLE, key
    name = f"{group}/{rest.replace('/', '.')}"
    return "".join(each if each.isalnum() or each in "_-./ " else "_" for each in name)
