"""`metrics.jsonl`: one object per train step, the truth that the console and TensorBoard are derived from.

Scalars are numbers; a histogram is a dict from value (as text) to count. Written by the learner, followed by others
(`areal_like.run.lines`). A writer first removes an unfinished line."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_like.run.lines import Follower, keep_lines

Row = dict[str, Any]


class MetricsLog:
    """Appends rows; each is in the file when `write` returns. A full disk raises OSError. Rows of steps after `done`
    are removed first: a resumed run writes them again."""

    def __init__(self, path: Path, done: int = 0):
        self.path = path
        keep_lines(path, lambda line: (_row(line) or {"step": math.inf})["step"] <= done)
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
    def __init__(self, path: Path):
        super().__init__(path, _row)


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
