"""`metrics.jsonl`: one object per train step, the truth that the console and TensorBoard are derived from.

Scalars are numbers; a histogram is a dict from value (as text) to count. Written by the learner, followed by others. A
process or a disk can fail in the middle of a row: readers ignore an unfinished last line and skip a damaged one; a
writer first removes the unfinished line."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def _plain(value: object) -> object:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class MetricsLog:
    """Appends rows; each is in the file when `write` returns. A full disk raises OSError at the row that won't fit.

    `done` is the number of train steps that a resumed run has behind it: rows of later steps will be written again.
    """

    def __init__(self, path: Path, done: int = 0):
        self.path = path
        _keep_rows(path, done)
        self._file = path.open("ab")

    def write(self, row: Mapping[str, object]) -> None:
        line = json.dumps({key: _plain(value) for key, value in row.items()}) + "\n"
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:  # the error of a write, unlike that of an open, does not name the file
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # After a failed write, closing tries it again and fails again: the first error is the one to report.
        with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
            self._file.close()


def _keep_rows(path: Path, done: int) -> None:
    """Remove the rows of steps after `done`, and a torn last line."""
    if path.is_file():
        rows = MetricsFollower(path).new_rows()
        beside = path.with_suffix(".tmp")
        beside.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] <= done))
        beside.replace(path)


class MetricsFollower:
    """Reads the rows of a growing file, each once; an unfinished last line is left for the next call."""

    def __init__(self, path: Path):
        self.path = path
        self._position = 0

    def new_rows(self) -> list[Row]:
        return list(self.each_new_row())

    def each_new_row(self) -> Iterator[Row]:
        """Like `new_rows`, one at a time: those of a long run fill no memory."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                if (row := _row(line)) is not None:
                    yield row


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
