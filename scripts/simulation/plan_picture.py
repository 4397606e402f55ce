"""The picture of a plan: throughput against the split, staleness against η, with the closed form beside both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .closed_form import Prediction
from .planning import Choice, Plan, Planner

NOTE = (
    "Dots: simulated with the production scheduler. Dashed: the closed form; candidates that it rules out are not "
    "simulated. Ring: the recommended plan."
)


@dataclass(frozen=True)
class Panel:
    """`lines`: label → what is drawn with dots; `formulas`: the same labels, or others → what is dashed."""

    title: str
    x: str
    lines: Mapping[str, Mapping[float, float]]
    formulas: Mapping[str, Mapping[float, float]]
    marked: tuple[float, float] | None = None
    names: Mapping[float, str] = field(default_factory=dict)


def plot_beside(path: Path, title: str, panels: Sequence[Panel], note: str) -> None:
    """Panels below each other; values that are not finite are left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 2.4 * len(panels) + 1), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=10)
    figure.supxlabel(note, fontsize=6, wrap=True)
    for axis, panel in zip(figure.subplots(len(panels), squeeze=False).flatten(), panels, strict=True):
        for drawn, style in ((panel.formulas, "--"), (panel.lines, "o-")):
            for label, points in drawn.items():
                known = sorted((x, y) for x, y in points.items() if math.isfinite(y))
                axis.plot([x for x, _ in known], [y for _, y in known], style, label=label, markersize=3.5)
        if panel.marked:
            axis.plot(*panel.marked, "ko", markersize=9, markerfacecolor="none")
        axis.set(title=panel.title, xlabel=panel.x, ylim=(0, None))
        axis.legend(fontsize=6)
        if panel.names:
            axis.set_xticks(list(panel.names), list(panel.names.values()))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def by_split(best: Plan, plans: Iterable[Plan], predicted: dict[Choice, Prediction]) -> Panel:
    """Of the modes and bounds of the grid, on as many GPUs as the best plan has."""
    lines: dict[str, dict[float, float]] = {}
    formulas: dict[str, dict[float, float]] = {}
    for made in plans:
        if made.choice in predicted and made.choice.gpus == best.choice.gpus:
            lines.setdefault(made.choice.mode, {})[_for_actors(made.choice)] = made.rate
    for choice, found in predicted.items():
        if choice.gpus == best.choice.gpus:
            formulas.setdefault(choice.mode, {})[_for_actors(choice)] = found.throughput
    x = f"GPUs for actors; the learner has the rest of {best.choice.gpus}"
    return Panel("samples per second", x, lines, formulas, (_for_actors(best.choice), best.rate))


def by_bound(plans: Sequence[Plan]) -> Panel:
    """Of async plans that differ in their bound only."""
    ordered = sorted(plans, key=lambda made: made.choice.bound or 0.0)
    bounds = [made.choice.bound or 0.0 for made in ordered]
    names = {float(place): "∞" if math.isinf(bound) else f"{bound:g}" for place, bound in enumerate(bounds)}
    lines = {
        "mean": {float(place): made.outcome.staleness_mean for place, made in enumerate(ordered)},
        "p95": {float(place): float(made.staleness_at(0.95)) for place, made in enumerate(ordered)},
    }
    formulas = {"mean, closed form": {float(place): made.predicted.staleness for place, made in enumerate(ordered)}}
    split = ordered[0].choice.split if ordered else ""
    return Panel(f"staleness in versions, {split} GPUs, async", "bound η", lines, formulas, names=names)


def draw(file: Path, best: Plan, planner: Planner, bounds: Sequence[Plan]) -> None:
    """`bounds`: async plans of the best one's split."""
    title = f"{best.choice.gpus} GPUs: {best.choice.split} for actors and learner, {best.choice.mode}"
    panels = [by_split(best, planner.made.values(), planner.predicted), by_bound(bounds)]
    plot_beside(file, title, panels, NOTE)


def _for_actors(choice: Choice) -> float:
    return float(choice.actors * choice.each)
