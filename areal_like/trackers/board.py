"""TensorBoard's event files, written without torch: scalars and histograms of each row, changed settings as hparams,
and samples as text."""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Mapping, Sequence

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from areal_like.trackers.interface import Shown, Tracked, markdown, numbers

TEXT = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))


class Board:
    """Files in RUN/tb."""

    def __init__(self, run: Tracked):
        # The record writer, not TensorBoard's usual one: that writes in a thread, where a full disk can't be caught.
        folder = run.folder / "tb"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.3f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._writer = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        set_by_user = {key: run.settings.get(key) for key in run.changed if key not in ("run.name", "run.dir")}
        hparams = {
            key: value if isinstance(value, int | float) else str(value)
            for key, value in set_by_user.items()
            if value is not None
        }
        self._write(Event(wall_time=time.time(), summary=hparams_pb(hparams, trial_id=run.name)))
        self.where = f"tensorboard --logdir {shlex.quote(str(folder))}"

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
        self._file.flush()

    def _put(self, step: int, values: Sequence[Summary.Value]) -> None:
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def add(self, row: Mapping[str, object]) -> None:
        values = []
        for tag, value in row.items():
            if isinstance(value, dict):
                values.append(Summary.Value(tag=tag, histo=_histogram(value)))
            elif isinstance(value, int | float):
                values.append(Summary.Value(tag=tag, simple_value=value))
        self._put(int(numbers(row)["step"]), values)

    def show(self, step: int, samples: Sequence[Shown]) -> None:
        if samples:
            text = TensorProto(dtype=DT_STRING, string_val=[markdown(samples).encode()])
            self._put(step, [Summary.Value(tag=f"samples/{samples[0].source}", tensor=text, metadata=TEXT)])

    def end(self, summary: Mapping[str, object] | None) -> None:
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
