"""What each tracker receives can be read back with its own package, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from areal_like.trackers.board import Board
from areal_like.trackers.interface import Shown, Tracked, numbers

HOSTILE = "<script>alert(1)</script> | `x` *y*\nnext [z](javascript:0)"
ROWS: list[dict[str, Any]] = [
    {"step": 1, "reward/mean": 0.5, "loss": None, "staleness/histogram": {"0": 3, "2": 4}},
    {"step": 2, "reward/mean": 0.25, "loss": 1.5, "staleness/histogram": {"0": 7}},
]
SAMPLES = [
    Shown("held-out", "What is 1 + 2?", "It is 3.", "3", 1.0, 0),
    Shown("held-out", HOSTILE, HOSTILE, "4", 0.0, 2),
]
SUMMARY = {"steps": 2, "reward_after": 0.75}


def a_run(folder: Path, resumed: bool = False) -> Tracked:
    settings = {"loss.name": "dg", "learner.lr": 0.002, "learner.compile": True, "run.name": "r", "replay": None}
    return Tracked(folder, "ours", "dg-lr=0.002", settings, ["loss.name", "learner.lr", "learner.compile"], resumed)


def fed(tracker: Any, rows: list[dict[str, Any]] = ROWS) -> Any:
    for row in rows:
        tracker.add(row)
    tracker.show(rows[-1]["step"], SAMPLES)
    tracker.end(SUMMARY)
    return tracker


# ---- TensorBoard ----------------------------------------------------------------------------------------------------


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    events.Reload()
    return events


def test_numbers_are_scalars_and_other_things_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    board = Board(a_run(folder))
    board.add({"step": 1, "reward/mean": 0.5, "loss": None, "note": "text"})
    board.add({"step": 3, "reward/mean": 0.25, "skipped_steps": 0})
    board.end(None)
    assert board.where == f"tensorboard --logdir '{folder}/tb'", "to be pasted into a shell"
    events = read(folder)
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.5), (3, 0.25)]
    assert set(events.Tags()["scalars"]) == {"step", "reward/mean", "skipped_steps"}


def test_a_dict_of_counts_is_a_histogram(tmp_path: Path) -> None:
    board = Board(a_run(tmp_path))
    board.add({"step": 1, "staleness/histogram": {"10": 1, "0": 3, "2": 4}})
    board.end(None)
    (event,) = read(tmp_path).Histograms("staleness/histogram")
    histogram = event.histogram_value
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (0, 10, 8, 18)
    assert histogram.sum_squares == 4 * 4 + 100
    counts = dict(zip(histogram.bucket_limit, histogram.bucket, strict=True))
    assert {limit - 0.5: count for limit, count in counts.items() if count} == {0: 3, 2: 4, 10: 1}


def test_an_empty_histogram_is_no_error(tmp_path: Path) -> None:
    board = Board(a_run(tmp_path))
    board.add({"step": 1, "staleness/histogram": {}})
    board.end(None)
    (event,) = read(tmp_path).Histograms("staleness/histogram")
    assert event.histogram_value.num == 0


def test_tensorboard_has_hparams_and_samples(tmp_path: Path) -> None:
    fed(Board(a_run(tmp_path)))
    events = read(tmp_path)
    started = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = plugin_data_pb2.HParamsPluginData.FromString(started).session_start_info.hparams
    assert (hparams["loss.name"].string_value, hparams["learner.lr"].number_value) == ("dg", 0.002)
    assert hparams["learner.compile"].bool_value is True
    (text,) = events.Tensors("samples/held-out")
    shown = text.tensor_proto.string_val[0].decode()
    assert text.step == 2 and "1 &#43; 2" in shown and "<script" not in shown and "`" not in shown


# ---- others ---------------------------------------------------------------------------------------------------------


def log_records(data: bytes) -> list[bytes]:
    """The records of W&B's offline file: blocks as in LevelDB's log, after a header of 7 bytes."""
    block, at, found, parts = 32768, 7, list[bytes](), list[bytes]()
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts.append(data[at + 7 : at + 7 + size])
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(b"".join(parts))
            parts.clear()
    return found


@pytest.mark.slow
def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    from wandb.proto.wandb_internal_pb2 import Record

    from areal_like.trackers.wandb import WeightsAndBiases

    fed(WeightsAndBiases(a_run(tmp_path)))
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    records = [Record.FromString(data) for data in log_records(file.read_bytes())]
    history = [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in each.history.item}
               for each in records if each.history.item]  # fmt: skip
    assert [(row["step"], row["reward/mean"]) for row in history if "reward/mean" in row] == [(1, 0.5), (2, 0.25)]
    assert any(key.startswith("samples/held-out") for row in history for key in row)
    (run,) = [each.run for each in records if each.HasField("run")][:1]
    assert (run.project, run.display_name) == ("ours", "dg-lr=0.002")
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["loss.name"] == "dg"


def test_numbers_leave_out_what_is_not_known() -> None:
    assert numbers(ROWS[0]) == {"step": 1.0, "reward/mean": 0.5}
