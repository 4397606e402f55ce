"""What each tracker receives can be read back with its own package, offline."""

from pathlib import Path
from typing import Any

import pytest

from areal_like.interfaces import Tracked
from areal_like.trackers.board import Board

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
