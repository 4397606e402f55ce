"""TensorBoard's event files, written without torch: the numbers of each row."""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from areal_like.interfaces import Tracked
from areal_like.run.metrics import numbers


class Board:
    """Files in RUN/tb."""

    def __init__(self, run: Tracked):
        # The record writer, not TensorBoard's usual one: that writes in a thread, where a full disk can't be caught.
        folder = run.folder / "tb"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.3f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._writer, self._begun = RecordWriter(self._file), False
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self.where = f"tensorboard --logdir {shlex.quote(str(folder))}"

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
        self._file.flush()

    def add(self, row: Mapping[str, object]) -> None:
        known = numbers(row)
        if not self._begun:  # steps from here on, of an earlier start, were undone: TensorBoard forgets them
            self._begun = True
            begin = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=int(known["step"]), session_log=begin))
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in known.items()]
        self._write(Event(wall_time=time.time(), step=int(known["step"]), summary=Summary(value=values)))

    def end(self, summary: Mapping[str, object] | None) -> None:
        self._file.close()
