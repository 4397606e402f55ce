"""Turns finished runs into `results.csv`, `results.md` and plots. Works at any time; lists missing runs."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..analysis.intervals import FEWEST_FOR_INTERVALS, Estimate, bootstrap, markdown_table
from ..plotting.drawing import keep
from ..plotting.plot import Plot
from . import overall, pictures
from .measures import Measure
from .points import Key, Result, by_point, cells, header, read
from .study import MAIN, Labels, Study

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
        scores = []
        for candidate in study.candidates():
            scores.append((candidate, bootstrap(r.numbers[measure.name] for r in members if r.run.tuned == candidate)))
        best = max(scores, key=lambda score: _rank(score[1], measure))
        if not best[1].count:
            place = ", ".join(key) or "all"
            raise ValueError(f"tuning of {place}: no run has a number for {measure.name!r}, so nothing can be picked")
        choices.append(Choice(key, scores, best[0]))
    return choices


def _rank(score: Estimate, measure: Measure) -> tuple[int, float]:
    if not score.count:
        return 0, -math.inf
    return score.count, score.mean if measure.higher_is_better else -score.mean


# What is written


def write(study: Study, folder: Path, results: Sequence[Result], choices: Sequence[Choice], command: str) -> str:
    """Write everything into `folder`; returns the markdown."""
    _write_csv(study, folder / "results.csv", results)
    main = [result for result in results if result.run.stage == MAIN]
    finished = sum(result.finished for result in results)
    text = f"# {study.name}\n\n`{command}`: {finished} of {len(results)} runs are finished.\n"
    for title, table in tables(study, main, choices).items():
        text += f"\n## {title}\n\n{table}"
    for name in _silent(study, main):
        measure = study.measures[name]
        text += f"\nNo finished run has a number for {name!r} ({measure.source}: {measure.key}).\n"
    (folder / "results.md").write_text(text)
    for name, plot in pictures.plots(study, main).items():
        keep(plot, folder / name)
    return text


def of_file(study: Study, path: Path) -> tuple[dict[str, str], dict[str, Plot]]:
    """Tables by title and plots by file, of a `results.csv`. Raises OSError, ValueError."""
    choices = choose(study, read(study, study.tuning_runs(), path)) if study.tune else []
    main = read(study, study.main_runs({choice.key: choice.picked for choice in choices}), path)
    return tables(study, main, choices), pictures.plots(study, main)


def tables(study: Study, main: Sequence[Result], choices: Sequence[Choice]) -> dict[str, str]:
    """Title → table."""
    found = {_heading(len(study.seeds)): _table(study, main)}
    found |= overall.tables(study, main)
    if choices:
        found["Tuning"] = _tuning_table(study, choices)
    return found


def _heading(seeds: int) -> str:
    if seeds == 1:
        return "Numbers of one seed"
    is_enough = seeds >= FEWEST_FOR_INTERVALS
    spread = "95 % bootstrap intervals" if is_enough else "their range (95 % intervals need five or more)"
    return f"Means over {seeds} seeds with {spread}"


def _write_csv(study: Study, path: Path, results: Sequence[Result]) -> None:
    beside = path.with_suffix(".tmp")
    with beside.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header(study))
        for result in results:
            numbers = ("" if number is None else number for number in result.numbers.values())
            writer.writerow([*cells(result.run), *numbers, result.run.name])
    beside.replace(path)


def _estimates(study: Study, main: Sequence[Result], measure: str) -> dict[Key, Estimate]:
    return {key: bootstrap(r.numbers[measure] for r in found) for key, found in by_point(study, main).items()}


def _table(study: Study, main: Sequence[Result]) -> str:
    points = by_point(study, main)
    estimates = [_estimates(study, main, measure) for measure in study.measures]
    tuned = list(study.tune.grid) if study.tune else []
    rows = []
    for key, found in points.items():
        rows.append([*key, *(found[0].run.tuned[name] for name in tuned), *(each[key] for each in estimates)])
    return markdown_table([*study.grid, *tuned, *study.measures], rows)


def _tuning_table(study: Study, choices: Sequence[Choice]) -> str:
    assert study.tune
    header = [*study.tune.per, *study.tune.grid, study.tune.by.name, "picked"]
    rows = []
    for choice in choices:
        for candidate, score in choice.scores:
            rows.append([*choice.key, *candidate.values(), score, "yes" if candidate == choice.picked else ""])
    return markdown_table(header, rows)


def _silent(study: Study, main: Sequence[Result]) -> list[str]:
    """Measures that no finished run has a number for: a misspelt key, or a target that is out of reach."""
    finished = [result for result in main if result.finished]
    return [name for name in study.measures if finished and all(r.numbers[name] is None for r in finished)]
