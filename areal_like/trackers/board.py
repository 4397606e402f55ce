"""TensorBoard's event files, by TensorBoard's own writer (without torch).

Scalars and histograms of each row; a layout for the "Custom scalars" tab, which shows first what matters first; what
the user has set as hparams, with the last held-out reward; samples as text.
"""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Mapping, Sequence

from google.protobuf import struct_pb2
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from areal_like.trackers.interface import Shown, Tracked, markdown, numbers

LAYOUT: dict[str, dict[str, list[str]]] = {
    "Learning": {
        "reward of a batch": ["reward/mean"],
        "held-out reward": ["eval/reward"],
        "loss, also held-out": ["loss", "eval/loss"],
        "entropy, nats per token": ["entropy"],
        "response length, tokens": ["response_length/mean", "response_length/p95"],
    },
    "Staleness": {
        "staleness of trained tokens, versions": ["staleness/mean", "staleness/max", "staleness/bound"],
        "importance ratio": ["ratio/mean", "ratio/max"],
        "effective sample size": ["ess"],
        "engine against learner, KL": ["mismatch_kl"],
    },
    "Throughput": {
        "tokens per second": ["rollout/tokens_per_second"],
        "idle share": ["rollout/idle_share", "train/idle_share"],
        "groups in the buffer": ["buffer/waiting", "buffer/running", "buffer/queued"],
        "weight update, seconds": ["rollout/update_apply_seconds", "rollout/update_pause_seconds"],
    },
}
"""Category → chart → tags."""
RESULT = "eval/reward"
"""The metric beside the hparams."""


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
        self._put(0, [_layout(), *_hparams(run)])
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
            self._put(step, [_text(f"samples/{samples[0].source}", markdown(samples))])

    def end(self, summary: Mapping[str, object] | None) -> None:
        status = api_pb2.STATUS_UNKNOWN if summary is None else api_pb2.STATUS_SUCCESS
        ended = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
        self._put(0, [_hparam_value("session_end_info", session_end_info=ended)])
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


def _tensor(content: bytes) -> TensorProto:
    return TensorProto(dtype=DT_STRING, string_val=[content], tensor_shape=TensorShapeProto())


def _for_plugin(name: str, content: bytes = b"") -> SummaryMetadata:
    return SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=name, content=content))


def _layout() -> Summary.Value:
    categories = []
    for title, charts in LAYOUT.items():
        made = []
        for chart, tags in charts.items():
            # Tags are patterns there.
            content = layout_pb2.MultilineChartContent(tag=[f"^{tag}$" for tag in tags])
            made.append(layout_pb2.Chart(title=chart, multiline=content))
        categories.append(layout_pb2.Category(title=title, chart=made))
    layout = layout_pb2.Layout(version=0, category=categories).SerializeToString()
    return Summary.Value(tag="custom_scalars__config__", tensor=_tensor(layout), metadata=_for_plugin("custom_scalars"))


def _hparam_value(name: str, **content: object) -> Summary.Value:
    data = plugin_data_pb2.HParamsPluginData(version=0, **content).SerializeToString()
    return Summary.Value(tag=f"_hparams_/{name}", tensor=_tensor(b""), metadata=_for_plugin("hparams", data))


def _hparams(run: Tracked) -> list[Summary.Value]:
    """What the user has set, and the metric to compare by."""
    started = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time(), group_name=run.name)
    infos = []
    for key in run.changed:
        value = run.settings.get(key)
        if value is None or key in ("run.name", "run.dir"):
            continue
        kind, plain = _typed(value)
        infos.append(api_pb2.HParamInfo(name=key, type=kind))
        started.hparams[key].CopyFrom(plain)
    metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in (RESULT, "reward/mean")]
    experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=metrics)
    return [
        _hparam_value("experiment", experiment=experiment),
        _hparam_value("session_start_info", session_start_info=started),
    ]


def _typed(value: object) -> tuple[int, struct_pb2.Value]:
    if isinstance(value, bool):
        return api_pb2.DATA_TYPE_BOOL, struct_pb2.Value(bool_value=value)
    if isinstance(value, int | float):
        return api_pb2.DATA_TYPE_FLOAT64, struct_pb2.Value(number_value=value)
    return api_pb2.DATA_TYPE_STRING, struct_pb2.Value(string_value=str(value))


def _text(tag: str, markdown: str) -> Summary.Value:
    return Summary.Value(tag=tag, tensor=_tensor(markdown.encode()), metadata=_for_plugin("text"))
