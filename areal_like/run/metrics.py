"""`metrics.jsonl`: one object per train step, the truth that the console and TensorBoard are derived from.

Scalars are numbers; a histogram is a dict from value (as text) to count. One process appends to a file of lines while
others read it (`Follower`). A process or a disk can fail in the middle of a line: readers leave an unfinished last line
for later and skip a damaged one; a writer first removes it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)
Row = dict[str, Any]
MOST = sys.float_info.max
T = TypeVar("T")


class Follower(Generic[T]):
    """Reads the lines of a growing file, each once. `decode` returns None for a damaged line."""

    def __init__(self, path: Path, decode: Callable[[bytes], T | None]):
        self.path, self._decode, self._position = path, decode, 0

    def new_rows(self) -> list[T]:
        return list(self.each_new_row())

    def each_new_row(self) -> Iterator[T]:
        """Like `new_rows`, one at a time: those of a long run fill no memory."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                if (row := self._decode(line)) is not None:
                    yield row


def keep_lines(path: Path, is_kept: Callable[[bytes], bool]) -> None:
    """Remove the other lines of a file, if there is one, and an unfinished last line."""
    if path.is_file():
        beside = path.with_suffix(".tmp")
        with beside.open("wb") as file:
            file.writelines(Follower(path, lambda line: line if is_kept(line) else None).each_new_row())
        beside.replace(path)


def keep_steps(path: Path, done: int) -> None:
    """Remove the rows of steps after `done` from a metrics file."""
    row_of = MetricsFollower(path).row_of
    keep_lines(path, lambda line: (row_of(line) or {"step": math.inf})["step"] <= done)


class MetricsLog:
    """Appends rows, in the file once `write` returns. Raises OSError. First removes rows of steps after `done`."""

    def __init__(self, path: Path, done: int = 0):
        self.path = path
        keep_steps(path, done)
        self._file = path.open("ab")

    def write(self, row: Mapping[str, object]) -> None:
        """NaN and infinity, which JSON lacks, become null."""
        plain = {name: None if isinstance(n, float) and not math.isfinite(n) else n for name, n in row.items()}
        try:
            self._file.write((json.dumps(plain) + "\n").encode())
            self._file.flush()
        except OSError as error:  # the error of a write, unlike that of an open, does not name the file
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # After a failed write, closing tries it again and fails again: the first error is the one to report.
        with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
            self._file.close()


class MetricsFollower(Follower[Row]):
    """Leaves out what `MetricsLog` has not written, and logs the first such line."""

    def __init__(self, path: Path):
        super().__init__(path, self.row_of)
        self._damaged = False

    def row_of(self, line: bytes) -> Row | None:
        try:
            row = json.loads(line)
            if isinstance(row["step"], int) and all(_fits(key, value) for key, value in row.items()):
                return dict(row)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            pass
        if not self._damaged:
            self._damaged = True
            log.warning("%s: left out a line that is no row of metrics: %r", self.path, line[:80])
        return None


def _fits(key: str, value: Any) -> bool:
    """Raises ValueError, TypeError, AttributeError."""
    if key.endswith("/histogram"):
        return all(-MOST < each < MOST for at, count in value.items() for each in (float(at), count))
    return value is None or -MOST < value < MOST


def numbers(row: Mapping[str, object]) -> dict[str, float]:
    """The row's numbers, without histograms and unknown values."""
    return {key: float(value) for key, value in row.items() if isinstance(value, int | float)}
