"""TensorBoard event files from rows of `metrics.jsonl`, by TensorBoard's own writer (without torch)."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class Board:
    """Scalars for numbers; a histogram for each dict from value to count."""

    def __init__(self, folder: Path):
        # The record writer, not TensorBoard's usual one: that writes in a thread, where a full disk can't be caught.
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.3f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._writer = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
        self._file.flush()

    def add(self, row: dict[str, Any]) -> None:
        values = []
        for tag, value in row.items():
            if isinstance(value, dict):
                values.append(Summary.Value(tag=tag, histo=_histogram(value)))
            elif isinstance(value, int | float):
                values.append(Summary.Value(tag=tag, simple_value=value))
        self._write(Event(wall_time=time.time(), step=row["step"], summary=Summary(value=values)))

    def close(self) -> None:
        self._file.close()


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
