"""Runs with their numbers, by point of the grid: from their folders, or from a `results.csv`."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .measures import Outcome
from .runs import Folder
from .study import Run, Study

Key = tuple[str, ...]
"""The labels of a point, in the order of the grid."""


@dataclass(frozen=True)
class Result:
    """A run and its measures; `outcome` is None until it is finished, and for one whose numbers come from a file."""

    run: Run
    outcome: Outcome | None
    numbers: dict[str, float | None]

    @property
    def finished(self) -> bool:
        return self.outcome is not None or any(number is not None for number in self.numbers.values())


def gather(study: Study, runs: Iterable[Run], folder: Folder) -> list[Result]:
    results = []
    for run in runs:
        outcome = Outcome(folder.run(run), run.config) if folder.is_finished(run) else None
        numbers = {name: outcome.measure(measure) if outcome else None for name, measure in study.measures.items()}
        results.append(Result(run, outcome, numbers))
    return results


def header(study: Study) -> list[str]:
    """Of a `results.csv`."""
    tuned = list(study.tune.grid) if study.tune else []
    return ["stage", *study.grid, *(f"tuned {key}" for key in tuned), "seed", *study.measures, "run"]


def cells(run: Run) -> list[str]:
    """What a row begins with: all up to the measures."""
    return [run.stage, *run.labels.values(), *run.tuned.values(), str(run.seed)]


def read(study: Study, runs: Iterable[Run], path: Path) -> list[Result]:
    """Numbers of runs that were made elsewhere. Raises OSError, ValueError for the file of another study."""
    with path.open(newline="") as file:
        first, *rows = list(csv.reader(file)) or [[]]
    if first != header(study):
        raise ValueError(f"{path}: not results of {study.name}: its columns are {', '.join(header(study))}")
    count = len(study.measures)
    known = {tuple(row[: -count - 1]): row[-count - 1 : -1] for row in rows}
    results = []
    for run in runs:
        numbers = known.get(tuple(cells(run)), [""] * count)
        found = {name: float(each) if each else None for name, each in zip(study.measures, numbers, strict=True)}
        results.append(Result(run, None, found))
    return results


def by_point(study: Study, main: Sequence[Result]) -> dict[Key, list[Result]]:
    points: dict[Key, list[Result]] = {}
    for result in main:
        points.setdefault(tuple(result.run.labels[factor] for factor in study.grid), []).append(result)
    return points
