"""What a plan is to be best at, and with how many of the GPUs.

samples_per_second      most of them, on all GPUs
tokens_per_second       trained tokens: where modes keep other answers, samples alone mislead
cost                    fewest GPU-hours per sample; GPUs may stay unused
samples_per_second=N    the fewest GPUs that come to N (tokens_per_second=N alike)
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .planning import Plan

FIGURES = ("samples_per_second", "tokens_per_second", "cost")
PARTS = 8
"""Where GPUs may stay unused, plans are made for so many parts of them: an eighth, two, ..."""


@dataclass(frozen=True)
class Target:
    """`enough`: the rate for which the fewest GPUs are wanted; None: as much as can be."""

    figure: str = FIGURES[0]
    enough: float | None = None

    def value(self, made: Plan) -> float:
        """What there should be most of."""
        if self.figure == "cost":
            return 1.0 / made.gpu_hours
        return made.rate if self.figure == "samples_per_second" else made.tokens_per_second

    def reached(self, made: Plan) -> bool:
        return self.enough is not None and self.value(made) >= self.enough

    def totals(self, gpus: int, each: int) -> list[int]:
        """Numbers of GPUs to plan for, the fewest first: an actor's and one for the learner are the least."""
        if self.figure != "cost" and self.enough is None:
            return [gpus]
        parts = {round(gpus * part / PARTS) for part in range(1, PARTS + 1)}
        return sorted(total for total in parts if total > each) or [gpus]

    def best_first(self, plans: Sequence[Plan]) -> list[Plan]:
        def rank(made: Plan) -> tuple[bool, int, float]:
            reached = self.reached(made)
            return not reached, made.choice.gpus if reached else 0, -self.value(made)

        return sorted(plans, key=rank)

    def __str__(self) -> str:
        return self.figure if self.enough is None else f"{self.figure}={self.enough:g}"


def target(text: str) -> Target:
    """Raises argparse.ArgumentTypeError."""
    figure, equals, rate = text.partition("=")
    try:
        enough = float(rate) if equals else None
    except ValueError:
        enough = math.nan
    if figure not in FIGURES:
        raise argparse.ArgumentTypeError(f"{text}: {', '.join(FIGURES)}, or a rate that is enough: {FIGURES[0]}=500")
    if enough is not None and (figure == "cost" or not 0 < enough < math.inf):
        raise argparse.ArgumentTypeError(f"{text}: a rate above 0 is enough, as in {FIGURES[0]}=500; cost has none")
    return Target(figure, enough)
