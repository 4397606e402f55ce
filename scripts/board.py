"""TensorBoard event files from rows of `metrics.jsonl`, by TensorBoard's own writer (torch is not needed)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class Board:
    """Scalars for numbers; a histogram for each dict from value to count."""

    def __init__(self, folder: Path):
        self._writer = EventFileWriter(str(folder))

    def add(self, row: dict[str, Any]) -> None:
        values = []
        for tag, value in row.items():
            if isinstance(value, dict):
                values.append(Summary.Value(tag=tag, histo=_histogram(value)))
            elif isinstance(value, int | float):
                values.append(Summary.Value(tag=tag, simple_value=value))
        event = Event(wall_time=time.time(), step=row["step"], summary=Summary(value=values))
        self._writer.add_event(event)

    def close(self) -> None:
        self._writer.close()


def _histogram(counts: dict[str, int]) -> HistogramProto:
    """One bucket per value; a bucket's limit is its upper edge."""
    pairs = sorted((float(value), count) for value, count in counts.items())
    return HistogramProto(
        min=pairs[0][0] if pairs else 0.0,
        max=pairs[-1][0] if pairs else 0.0,
        num=sum(count for _, count in pairs),
        sum=sum(value * count for value, count in pairs),
        sum_squares=sum(value * value * count for value, count in pairs),
        bucket_limit=[value + 0.5 for value, _ in pairs],
        bucket=[count for _, count in pairs],
    )
