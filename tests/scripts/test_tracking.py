"""Trackers read a run's files; one that fails harms neither the run nor the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from areal_like.config import run_config as configs
from areal_like.run.samples import HELDOUT, TRAINED, SampleLog, kept
from areal_like.trackers.interface import Shown, Tracked
from areal_like.types import Sample
from scripts.following import tracking
from scripts.following.tracking import Tracking

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


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Tracking]:
    """Starts trackers of a run whose folder has samples of an evaluation and of a trained group."""

    def started(*names: str) -> Tracking:
        trackers = ",".join(f"{HERE}:{name}" for name in names)
        config = configs.load(
            ["configs/quickstart.yaml", f"run.trackers=[{trackers}]", "run.steps=100", "learner.lr=3e-3"]
        )
        configs.save(config, tmp_path / "config.yaml")
        Recorder.made.clear()
        return Tracking(config, tmp_path)

    def sample(reward: float) -> Sample:
        tokens, ones = np.array([5, 6, 7, 1], np.int32), np.ones(2, bool)
        return Sample(tokens, 2, np.zeros(2, np.float32), ones, [(3, 2)], reward, "stop")

    heldout, trained = (SampleLog(tmp_path, fate, steps=100, most=None) for fate in (HELDOUT, TRAINED))
    for row in range(6):
        heldout.write(kept(HELDOUT, 1, 4, (row, 0), sample(row / 10)))
    for index, reward in enumerate((0.5, 0.0, 1.0)):
        trained.write(kept(TRAINED, 1, 4, (7, index), sample(reward)))
    return started


def test_rows_and_samples_reach_a_tracker_and_one_that_fails_is_left(start: Callable[..., Tracking]) -> None:
    started = start("Broken", "Recorder")
    for step in (1, 2, 3):
        started.row({"step": step})
    assert started.end({"steps": 2}) == [
        f"tracker {HERE}:Broken: the rest of the run is not shown there: the server is gone",
        f"{HERE}:Recorder: look here",
    ]
    _, recorder = Recorder.made
    assert [row["step"] for row in recorder.rows] == [1, 2, 3] and recorder.ended == [{"steps": 2}]
    heldout, trained = recorder.shown
    assert [each.reward for each in heldout] == [0.0, 0.1, 0.2, 0.3] and heldout[0].source == "held-out"
    assert [each.reward for each in trained] == [1.0, 0.0] and trained[0].staleness == 1
    assert recorder.run.settings["learner.lr"] == 3e-3


def test_a_tracker_that_hangs_does_not_hold_the_end_up(
    start: Callable[..., Tracking], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "END_SECONDS", 0.2)
    started = start("Hanging")
    started.row({"step": 1})
    (note, *_) = started.end(None)
    Hanging.let_go.set()
    assert "have not taken everything within 0 s" in note and "Hanging" in note


def test_samples_that_cannot_be_read_are_noted_once(start: Callable[..., Tracking], tmp_path: Path) -> None:
    started = start("Recorder")
    (tmp_path / "config.yaml").unlink()
    for step in (1, 2):
        started.row({"step": step})
    assert len([note for note in started.end(None) if note.startswith("trackers show no samples")]) == 1
    (recorder,) = Recorder.made
    assert len(recorder.rows) == 2 and not recorder.shown
