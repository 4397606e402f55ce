"""Trackers have a run's rows; one that fails harms neither the run nor the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from areal_like.config import run_config as configs
from areal_like.interfaces import Tracked
from scripts.following import tracking
from scripts.following.tracking import Tracking

HERE = "tests.scripts.test_tracking"


class Recorder:
    """Records its calls."""

    made: ClassVar[list[Recorder]] = []

    def __init__(self, run: Tracked):
        self.run, self.rows, self.ended = run, list[Any](), list[Any]()
        self.where = "look here"
        Recorder.made.append(self)

    def add(self, row: Mapping[str, object]) -> None:
        self.rows.append(row)

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
    """Starts trackers of a run."""

    def started(*names: str) -> Tracking:
        trackers = ",".join(f"{HERE}:{name}" for name in names)
        config = configs.load(
            ["configs/quickstart.yaml", f"run.trackers=[{trackers}]", "run.steps=100", "learner.lr=3e-3"]
        )
        Recorder.made.clear()
        return Tracking(config, tmp_path)

    return started


def test_rows_reach_a_tracker_and_one_that_fails_is_left(start: Callable[..., Tracking]) -> None:
    started = start("Broken", "Recorder")
    for step in (1, 2, 3):
        started.row({"step": step})
    assert started.end({"steps": 2}) == [
        f"tracker {HERE}:Broken: the rest of the run is not shown there: the server is gone",
        f"{HERE}:Recorder: look here",
    ]
    _, recorder = Recorder.made
    assert [row["step"] for row in recorder.rows] == [1, 2, 3] and recorder.ended == [{"steps": 2}]
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
