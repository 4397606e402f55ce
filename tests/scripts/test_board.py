"""TensorBoard reads back what was written."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scripts.board import Board


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    return events


def test_numbers_are_scalars_and_other_things_are_left_out(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.add({"step": 1, "reward/mean": 0.5, "loss": None, "note": "text"})
    board.add({"step": 3, "reward/mean": 0.25, "skipped_steps": 0})
    board.close()
    events = read(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.5), (3, 0.25)]
    assert set(events.Tags()["scalars"]) == {"step", "reward/mean", "skipped_steps"}


def test_a_dict_of_counts_is_a_histogram(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.add({"step": 1, "staleness/histogram": {"10": 1, "0": 3, "2": 4}})
    board.close()
    (event,) = read(tmp_path).Histograms("staleness/histogram")
    histogram = event.histogram_value
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (0, 10, 8, 18)
    assert histogram.sum_squares == 4 * 4 + 100
    counts = dict(zip(histogram.bucket_limit, histogram.bucket, strict=True))
    assert {limit - 0.5: count for limit, count in counts.items() if count} == {0: 3, 2: 4, 10: 1}


def test_an_empty_histogram_is_no_error(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.add({"step": 1, "staleness/histogram": {}})
    board.close()
    (event,) = read(tmp_path).Histograms("staleness/histogram")
    assert event.histogram_value.num == 0
