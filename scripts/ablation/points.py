"""Runs with their numbers, by point of the grid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .measures import Outcome
from .runs import Folder
from .study import Run, Study

Key = tuple[str, ...]
"""The labels of a point, in the order of the grid."""


@dataclass(frozen=True)
class Result:
    """A run and its measures; `outcome` is None until it is finished."""

    run: Run
    outcome: Outcome | None
    numbers: dict[str, float | None]


def gather(study: Study, runs: Iterable[Run], folder: Folder) -> list[Result]:
    results = []
    for run in runs:
        outcome = Outcome(folder.run(run), run.config) if folder.is_finished(run) else None
        numbers = {name: outcome.measure(measure) if outcome else None for name, measure in study.measures.items()}
        results.append(Result(run, outcome, numbers))
    return results


def by_point(study: Study, main: Sequence[Result]) -> dict[Key, list[Result]]:
    points: dict[Key, list[Result]] = {}
    for result in main:
        points.setdefault(tuple(result.run.labels[factor] for factor in study.grid), []).append(result)
    return points
