"""Trackers have a run's rows; one that fails harms neither the run nor the others. What each receives can be read back
with its own package, offline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from areal_like.config import run_config as configs
from areal_like.interfaces import Tracked
from areal_like.trackers.board import Board
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


ROWS: list[dict[str, Any]] = [
    {"step": 1, "reward/mean": 0.5, "loss": None, "staleness/histogram": {"10": 1, "0": 3, "2": 4}},
    {"step": 2, "reward/mean": 0.25, "loss": 1.5, "staleness/histogram": {"0": 7}},
]
SUMMARY = {"steps": 2, "reward_after": 0.75}


def a_run(folder: Path) -> Tracked:
    settings = {"loss.name": "dg", "learner.lr": 0.002, "learner.compile": True, "run.name": "r", "replay": None}
    return Tracked(folder, "ours", "dg-lr=0.002", settings)


def fed(tracker: Any, rows: list[dict[str, Any]] = ROWS) -> Any:
    for row in rows:
        tracker.add(row)
    tracker.end(SUMMARY)
    return tracker


def test_tensorboard_has_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "a b"
    board = Board(a_run(folder))
    assert board.where == f"tensorboard --logdir '{folder}/tb'", "to be pasted into a shell"
    fed(board)
    events = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0})
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.5), (2, 0.25)]
    assert set(events.Tags()["scalars"]) == {"step", "reward/mean", "loss"}
    resumed = [{"step": 2, "reward/mean": 0.75}, {"step": 3, "reward/mean": 1.0}]
    fed(Board(a_run(folder)), resumed)
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.5), (2, 0.75), (3, 1.0)]


@pytest.mark.slow
def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in (("WANDB_MODE", "offline"), ("WANDB_CACHE_DIR", "cache"), ("WANDB_DATA_DIR", "data")):
        monkeypatch.setenv(key, value if key == "WANDB_MODE" else str(tmp_path / value))
    from areal_like.trackers.wandb import WeightsAndBiases

    fed(WeightsAndBiases(a_run(tmp_path)))
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    written = file.read_bytes()
    for text in (b"ours", b"dg-lr=0.002", b"loss.name", b"reward/mean", b"0.25"):
        assert text in written, text
