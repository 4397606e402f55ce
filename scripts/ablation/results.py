"""Turns finished runs into `results.csv` and `results.md`. Works at any time; lists missing runs."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..analysis.intervals import FEWEST_FOR_INTERVALS, Estimate, bootstrap, markdown_table
from .measures import Outcome
from .runs import Folder
from .study import MAIN, Labels, Run, Study

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
    points = defaultdict[Key, list[Result]](list)
    for result in main:
        points[tuple(result.run.labels[factor] for factor in study.grid)].append(result)
    return dict(points)


# Tuning


@dataclass(frozen=True)
class Choice:
    """The candidates of one tuning with their scores, and the one that was picked."""

    key: Key
    scores: list[tuple[Labels, Estimate]]
    picked: Labels


def choose(study: Study, results: Sequence[Result]) -> list[Choice]:
    """For each tuning the candidate with the best mean. Candidates without a number for each seed (a run failed, or
    never reached the target) rank last. Raises ValueError if no candidate has any number."""
    assert study.tune
    measure, by_key = study.tune.by, defaultdict[Key, list[Result]](list)
    for result in results:
        by_key[study.tuned_for(result.run.labels)].append(result)
    choices = []
    for key, members in by_key.items():
        scores = [
            (candidate, bootstrap(result.numbers[measure.name] for result in members if result.run.tuned == candidate))
            for candidate in study.candidates()
        ]
        sign = 1 if measure.higher_is_better else -1
        best = max(scores, key=lambda score: (score[1].count, sign * score[1].mean if score[1].count else 0.0))
        if not best[1].count:
            place = ", ".join(key) or "all"
            raise ValueError(f"tuning of {place}: no run has a number for {measure.name!r}, so nothing can be picked")
        choices.append(Choice(key, scores, best[0]))
    return choices


# Files


def write(study: Study, folder: Path, results: Sequence[Result], choices: Sequence[Choice], command: str) -> str:
    """Write the tables into `folder`; returns the markdown."""
    _write_csv(study, folder / "results.csv", results)
    main = [result for result in results if result.run.stage == MAIN]
    finished = [result for result in results if result.outcome]
    text = f"# {study.name}\n\n`{command}`: {len(finished)} of {len(results)} runs are finished.\n"
    spread = "95 % bootstrap intervals" if len(study.seeds) >= FEWEST_FOR_INTERVALS else "their range"
    text += f"\n## Means over seeds ({len(study.seeds)}) with {spread}\n\n{_table(study, main)}"
    if choices:
        text += f"\n## Tuning\n\n{_tuning_table(study, choices)}"
    for name, measure in study.measures.items():
        if finished and all(result.numbers[name] is None for result in finished):
            text += f"\nNo finished run has a number for {name!r} ({measure.source}: {measure.key}).\n"
    (folder / "results.md").write_text(text)
    return text


def _write_csv(study: Study, path: Path, results: Sequence[Result]) -> None:
    tuned = list(study.tune.grid) if study.tune else []
    beside = path.with_suffix(".tmp")
    with beside.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["stage", *study.grid, *(f"tuned {key}" for key in tuned), "seed", *study.measures, "run"])
        for result in results:
            run, numbers = result.run, ("" if number is None else number for number in result.numbers.values())
            writer.writerow([run.stage, *run.labels.values(), *run.tuned.values(), run.seed, *numbers, run.name])
    beside.replace(path)


def _table(study: Study, main: Sequence[Result]) -> str:
    tuned = list(study.tune.grid) if study.tune else []
    rows = []
    for key, found in by_point(study, main).items():
        estimates = [bootstrap(result.numbers[measure] for result in found) for measure in study.measures]
        rows.append([*key, *(found[0].run.tuned[name] for name in tuned), *estimates])
    return markdown_table([*study.grid, *tuned, *study.measures], rows)


def _tuning_table(study: Study, choices: Sequence[Choice]) -> str:
    assert study.tune
    header = [*study.tune.per, *study.tune.grid, study.tune.by.name, "picked"]
    rows = [
        [*choice.key, *candidate.values(), score, "yes" if candidate == choice.picked else ""]
        for choice in choices
        for candidate, score in choice.scores
    ]
    return markdown_table(header, rows)
