"""Held-out measures of a run: `SET/FIGURE`, such as `heldout/reward` or `aime/pass@8`, and which evaluation is best."""

from collections.abc import Mapping, Sequence
from typing import Any

from areal_like.config.schema import OWN

Evaluation = Mapping[str, Any]


def measured(evaluation: Evaluation, measure: str) -> float | None:
    """None: this evaluation does not have it."""
    name, _, figure = measure.rpartition("/")
    of_set: Evaluation = evaluation.get("sets", {}).get(name, evaluation if name == OWN else {})
    return of_set.get(figure)


def best_of(evaluations: Sequence[Evaluation], measure: str) -> tuple[Evaluation | None, int]:
    """The best evaluation of trained weights (None: there is none), the first of equal ones, and the number of those
    behind it."""
    found = [each for each in evaluations if each["version"] and measured(each, measure) is not None]
    ranks = [measured(each, measure) or 0.0 for each in found]
    if not found:
        return None, 0
    place = ranks.index(max(ranks))
    return found[place], len(found) - 1 - place
