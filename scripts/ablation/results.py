"""Turns finished runs into `results.csv`, `results.md` and `curves.png`. Works at any time; lists missing runs."""

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..analysis.intervals import FEWEST_FOR_INTERVALS, Estimate, band, bootstrap, markdown_table
from .measures import Outcome
from .runs import Folder
from .study import MAIN, Labels, Run, Study

Key = tuple[str, ...]
"""The labels of a point, in the order of the grid."""
UNITS = {"samples": "samples trained", "steps": "train steps", "seconds": "seconds since the first lease"}


class Result(NamedTuple):
    """A run and its measures; `outcome` is None until it is finished."""

    run: Run
    outcome: Outcome | None
    numbers: dict[str, float | None]


def gather(study: Study, runs: Iterable[Run], folder: Folder) -> list[Result]:
    results = []
    for run in runs:
        outcome = Outcome(folder.run(run), run.config) if folder.is_finished(run) else None
        numbers = {name: outcome.measure(measure) if outcome else None for name, measure in study.measure.items()}
        results.append(Result(run, outcome, numbers))
    return results


class Choice(NamedTuple):
    """The candidates of one tuning with their scores, and the one that was picked."""

    key: Key
    scores: list[tuple[Labels, Estimate]]
    picked: Labels


def choose(study: Study, results: Sequence[Result]) -> list[Choice]:
    """For each tuning the candidate with the best mean. Candidates without a number for each seed (a run failed, or
    never reached the target) rank last. Raises ValueError if no candidate has any number."""
    assert study.tune
    by, numbers = study.tune.by, defaultdict[Key, list[tuple[Labels, float | None]]](list)
    for result in results:
        numbers[study.tuned_for(result.run.labels)].append((result.run.tuned, result.numbers[by]))
    sign, choices = 1 if study.measure[by].higher_is_better else -1, []
    for key, found in numbers.items():
        scores = [(each, bootstrap(number for tuned, number in found if tuned == each)) for each in study.candidates()]
        picked, best = max(scores, key=lambda score: (score[1].n, sign * score[1].mean if score[1].n else 0.0))
        if not best.n:
            place = ", ".join(key) or "all"
            raise ValueError(f"tuning of {place}: no run has a number for {by!r}, so nothing can be picked")
        choices.append(Choice(key, scores, picked))
    return choices


def write(study: Study, folder: Path, results: Sequence[Result], choices: Sequence[Choice], command: str) -> str:
    """Write tables and curves into `folder`; returns the markdown."""
    tuned = list(study.tune.grid) if study.tune else []
    points = defaultdict[Key, list[Result]](list)
    with (folder / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["stage", *study.grid, *(f"tuned {key}" for key in tuned), "seed", *study.measure, "run"])
        for result in results:
            run, numbers = result.run, ("" if number is None else number for number in result.numbers.values())
            writer.writerow([run.stage, *run.labels.values(), *run.tuned.values(), run.seed, *numbers, run.name])
            if run.stage == MAIN:
                points[tuple(run.labels[factor] for factor in study.grid)].append(result)

    finished = [result for result in results if result.outcome]
    spread = "95 % bootstrap intervals" if len(study.seeds) >= FEWEST_FOR_INTERVALS else "their range"
    text = f"# {study.name}\n\n`{command}`: {len(finished)} of {len(results)} runs are finished.\n"
    text += f"\n## Means over seeds ({len(study.seeds)}) with {spread}\n\n"
    rows: list[list[Any]] = []
    for key, found in points.items():
        estimates = [bootstrap(result.numbers[measure] for result in found) for measure in study.measure]
        rows.append([*key, *(found[0].run.tuned[name] for name in tuned), *estimates])
    text += markdown_table([*study.grid, *tuned, *study.measure], rows)
    if study.tune and choices:
        rows = [
            [*choice.key, *candidate.values(), score, "yes" if candidate == choice.picked else ""]
            for choice in choices
            for candidate, score in choice.scores
        ]
        text += f"\n## Tuning\n\n{markdown_table([*study.tune.per, *tuned, study.tune.by, 'picked'], rows)}"
    for name, measure in study.measure.items():
        if finished and all(result.numbers[name] is None for result in finished):
            text += f"\nNo finished run has a number for {name!r} ({measure.source}: {measure.key}).\n"
    (folder / "results.md").write_text(text, encoding="utf-8")
    _draw(study, points, folder / "curves.png")
    return text


def _draw(study: Study, points: dict[Key, list[Result]], path: Path) -> None:
    """The study's curve: a line for each value of the first factor, a panel for each combination of the others."""
    panels: dict[str, dict[str, list[Any]]] = {}
    factors = [factor.rpartition(".")[2] for factor in study.grid]
    for key, results in points.items():
        curves = [curve for result in results if result.outcome and (curve := result.outcome.curve(study.curve))[0]]
        if curves:
            title = ", ".join(f"{factor} = {label}" for factor, label in zip(factors[1:], key[1:], strict=True))
            panels.setdefault(title, {})[key[0]] = curves
    if not panels:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.6 * len(panels)), dpi=120, layout="constrained")
    grid = figure.subplots(len(panels), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (title, lines) in zip(grid, panels.items(), strict=True):
        for label, curves in lines.items():
            x, mean, low, high = band(curves)
            (line,) = axes.plot(x, mean, label=label)
            for own, y in curves if len(curves) > 1 else ():
                axes.plot(own, y, color=line.get_color(), alpha=0.3, linewidth=0.6)
            if len(curves) >= FEWEST_FOR_INTERVALS:
                axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        axes.set(title=title, ylabel=study.curve.y)
        axes.legend(fontsize="small")
    grid[-1].set_xlabel(UNITS[study.curve.x])
    figure.savefig(path)
