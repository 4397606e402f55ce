"""What is compared, over all points of the grid at once: interquartile means, chances of improvement, every pair."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from ..analysis.intervals import Estimate, markdown_table
from ..analysis.pairing import p_value
from .measures import Measure
from .points import Result, by_point
from .study import Study

Numbers = dict[str, dict[str, dict[int, float]]]
"""Label of the first factor → the other factors' labels → seed → number."""


MEANS = "All points together: interquartile means of all runs, with stratified 95 % bootstrap intervals"
PAIRS = """Every pair, by {}: the difference of a seed's mean over the points, p of a permutation test with Holm's \
correction for all pairs, and the chance that a run of the second is better"""


def tables(study: Study, main: Sequence[Result]) -> dict[str, str]:
    """Title → table; empty where fewer than two labels have numbers."""
    first = next(iter(study.measures.values()))
    found = {name: _numbers(study, main, name) for name in study.measures}
    if len(found[first.name]) < 2:
        return {}
    return {MEANS: _means(study, found), PAIRS.format(first.name): _pairs(found[first.name], first)}


def _numbers(study: Study, main: Sequence[Result], measure: str) -> Numbers:
    found: Numbers = {}
    for (label, *rest), results in by_point(study, main).items():
        known = {r.run.seed: number for r in results if (number := r.numbers[measure]) is not None}
        if known:
            found.setdefault(label, {})[", ".join(rest)] = known
    return found


def _means(study: Study, found: dict[str, Numbers]) -> str:
    from ..analysis.aggregates import iqm  # imports scipy.stats: half a second that only those who ask for it pay

    factor = next(iter(study.grid))
    none = Estimate(float("nan"), float("nan"), float("nan"), 0, 0)
    rows = []
    for label in study.grid[factor]:
        numbers = [each.get(label, {}) for each in found.values()]
        scores = [{point: list(seeds.values()) for point, seeds in points.items()} for points in numbers]
        rows.append([label, *(iqm(each) if each else none for each in scores)])
    return markdown_table([factor, *study.measures], rows)


def _pairs(numbers: Numbers, measure: Measure) -> str:
    """Of the points that all have, and the seeds that are in all of these."""
    from ..analysis.aggregates import improvement, pairwise

    shared = [point for point in next(iter(numbers.values())) if all(point in points for points in numbers.values())]
    means = {
        label: {seed: fmean(points[at][seed] for at in shared) for seed in _seeds([points[at] for at in shared])}
        for label, points in numbers.items()
    }
    rows = []
    for pair in pairwise(means):
        scores = ({at: list(numbers[name][at].values()) for at in shared} for name in (pair.second, pair.first))
        one, other = scores if measure.higher_is_better else reversed(list(scores))
        found = pair.found
        change = f"{found.difference:+.3g} [{found.low:+.3g}, {found.high:+.3g}]"
        rows.append([pair.first, pair.second, change, p_value(pair.p), improvement(one, other).text(2)])
    return markdown_table(["first", "second", "second − first", "p", "second is better"], rows)


def _seeds(points: Sequence[dict[int, float]]) -> list[int]:
    return [seed for seed in (points[0] if points else ()) if all(seed in point for point in points)]
