"""`metrics.jsonl`: one object per train step, the truth that the console and TensorBoard are derived from.

Scalars are numbers; a histogram is a dict from value (as text) to count. Written by the learner, followed by others.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class MetricsLog:
    """Appends rows. A full disk raises OSError at the row that did not fit."""

    def __init__(self, path: Path):
        self._file = path.open("a", buffering=1)

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps({key: _plain(value) for key, value in row.items()}) + "\n")

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class MetricsFollower:
    """Reads the rows of a growing file, each once; an unfinished last line is left for the next call."""

    def __init__(self, path: Path):
        self.path = path
        self._position = 0

    def new_rows(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        return [json.loads(line) for line in complete.splitlines()]
