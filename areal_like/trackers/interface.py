"""Interface of trackers, which show the rows of RUN/metrics.jsonl. `scripts/following/tracking.py`
feeds them, in a thread: the failure of one is reported once and never stops a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Tracked:
    """A run. `settings`: dotted key → value of its whole config."""

    folder: Path
    project: str
    name: str
    settings: Mapping[str, object]


class Tracker(Protocol):
    """Built with a `Tracked`. May raise any error: the run goes on without it.

    `where`: for the user, how to look at the run there.
    """

    where: str

    def __init__(self, run: Tracked) -> None: ...

    def add(self, row: Mapping[str, object]) -> None:
        """A row of metrics.jsonl: "step", numbers or None, histograms as dicts from value (text) to count."""

    def end(self, summary: Mapping[str, object] | None) -> None:
        """The run has ended, or (None) was interrupted. All that was sent must be safe when this returns."""


def numbers(row: Mapping[str, object]) -> dict[str, float]:
    """The row's numbers, without histograms and unknown values."""
    return {key: float(value) for key, value in row.items() if isinstance(value, int | float)}
