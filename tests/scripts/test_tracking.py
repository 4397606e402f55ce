"""Trackers read a run's files; one that fails harms neither the run nor the others."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from areal_like.config import run_config as configs
from areal_like.run.samples import HELDOUT, TRAINED, SampleLog, kept
from areal_like.trackers.interface import Shown, Tracked
from areal_like.types import Sample
from scripts.following import tracking

HERE = "tests.scripts.test_tracking"


class Recorder:
    """Records its calls."""

    made: ClassVar[list[Recorder]] = []

    def __init__(self, run: Tracked):
        self.run, self.rows, self.shown, self.ended = run, list[Any](), list[list[Shown]](), list[Any]()
        self.where = "look here"
        Recorder.made.append(self)

    def add(self, row: Mapping[str, object]) -> None:
        self.rows.append(row)

    def show(self, step: int, samples: Sequence[Shown]) -> None:
        self.shown.append(list(samples))

    def end(self, summary: Mapping[str, object] | None) -> None:
        self.ended.append(summary)


class Broken(Recorder):
    def add(self, row: Mapping[str, object]) -> None:
        raise RuntimeError("the server is gone")


class Hanging(Recorder):
    let_go = threading.Event()

    def add(self, row: Mapping[str, object]) -> None:
        self.let_go.wait(60)


def a_folder(folder: Path, *names: str) -> configs.Config:
    trackers = ",".join(f"{HERE}:{name}" for name in names)
    config = configs.load(["configs/quickstart.yaml", f"run.trackers=[{trackers}]", "run.steps=100", "learner.lr=3e-3"])
    configs.save(config, folder / "config.yaml")
    Recorder.made.clear()
    return config


def sample(reward: float) -> Sample:
    return Sample(
        np.array([5, 6, 7, 1], np.int32), 2, np.zeros(2, np.float32), np.ones(2, bool), [(3, 2)], reward, "stop"
    )


def write_samples(folder: Path) -> None:
    heldout = SampleLog(folder, HELDOUT, steps=100, most=None)
    for row in range(6):
        heldout.write(kept(HELDOUT, 1, 4, (row, 0), sample(row / 10)))
    trained = SampleLog(folder, TRAINED, steps=100, most=None)
    for index, reward in enumerate((0.5, 0.0, 1.0)):
        trained.write(kept(TRAINED, 1, 4, (7, index), sample(reward)))


def test_rows_and_samples_reach_a_tracker(tmp_path: Path) -> None:
    config = a_folder(tmp_path, "Recorder")
    told = tracking.Tracking(config, tmp_path)
    write_samples(tmp_path)
    told.row({"step": 1, "reward/mean": 0.5})
    told.row({"step": 2, "reward/mean": 0.6})
    assert told.end({"steps": 2}) == [f"{HERE}:Recorder: look here"]
    (recorder,) = Recorder.made
    assert [row["step"] for row in recorder.rows] == [1, 2] and recorder.ended == [{"steps": 2}]
    heldout, trained = recorder.shown
    assert [each.reward for each in heldout] == [0.0, 0.1, 0.2, 0.3] and heldout[0].source == "held-out"
    assert [each.reward for each in trained] == [1.0, 0.0] and trained[0].staleness == 1
    assert recorder.run.settings["learner.lr"] == 3e-3 and "learner.lr" in recorder.run.changed
    assert "learner.clip_grad" not in recorder.run.changed and not recorder.run.resumed


def test_a_tracker_that_fails_is_told_of_once_and_left(tmp_path: Path) -> None:
    told = tracking.Tracking(a_folder(tmp_path, "Broken", "Recorder"), tmp_path)
    for step in (1, 2, 3):
        told.row({"step": step})
    notes = told.end(None)
    assert notes == [
        f"tracker {HERE}:Broken: the rest of the run is not shown there: the server is gone",
        f"{HERE}:Recorder: look here",
    ]
    _, recorder = Recorder.made
    assert len(recorder.rows) == 3 and recorder.ended == [None]


def test_a_tracker_that_hangs_does_not_hold_the_end_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "END_SECONDS", 0.2)
    told = tracking.Tracking(a_folder(tmp_path, "Hanging"), tmp_path)
    told.row({"step": 1})
    (note, *_) = told.end(None)
    Hanging.let_go.set()
    assert "have not taken everything within 0 s" in note and "Hanging" in note


def test_samples_that_cannot_be_read_are_told_of_once(tmp_path: Path) -> None:
    told = tracking.Tracking(a_folder(tmp_path, "Recorder"), tmp_path)
    write_samples(tmp_path)
    (tmp_path / "config.yaml").unlink()
    told.row({"step": 1})
    told.row({"step": 2})
    assert [note for note in told.end(None) if note.startswith("trackers show no samples")]
    (recorder,) = Recorder.made
    assert len(recorder.rows) == 2 and not recorder.shown
