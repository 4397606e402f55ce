"""Turns finished runs into `results.csv`, `results.md` and plots. Works at any time; lists missing runs."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..comparison import Estimate, bootstrap, markdown_table
from ..plotting.drawing import keep
from . import overall, pictures
from .measures import Measure
from .points import Key, Result, by_point
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
    finished = sum(result.outcome is not None for result in results)
    text = f"# {study.name}\n\n`{command}`: {finished} of {len(results)} runs are finished. Means over "
    text += f"{len(study.seeds)} seeds with 95 % bootstrap intervals.\n\n{_table(study, main)}"
    text += overall.section(study, main)
    if choices:
        text += f"\n## Tuning\n\n{_tuning_table(study, choices)}"
    for name in _silent(study, main):
        text += f"\nNo finished run has a number for {name!r}.\n"
    (folder / "results.md").write_text(text)
    for name, plot in pictures.plots(study, main).items():
        keep(plot, folder / name)
    return text


def _write_csv(study: Study, path: Path, results: Sequence[Result]) -> None:
    tuned = list(study.tune.grid) if study.tune else []
    beside = path.with_suffix(".tmp")
    with beside.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["stage", *study.grid, *(f"tuned {key}" for key in tuned), "seed", *study.measures, "run"])
        for result in results:
            run, numbers = result.run, result.numbers.values()
            cells = [*(run.labels[factor] for factor in study.grid), *(run.tuned[key] for key in tuned), run.seed]
            writer.writerow([run.stage, *cells, *("" if n is None else n for n in numbers), run.name])
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
    finished = [result for result in main if result.outcome]
    return [name for name in study.measures if finished and all(r.numbers[name] is None for r in finished)]
