"""Claim: with one reward at the end of a long answer DG fails (arXiv 2604.06159, of TPO's authors).

`python -m scripts.claims.terminal [--quick] [--out FOLDER]`

Token reversal without frictions, reward 1 for an answer without a mistake and 0 otherwise, H = 7 to 10 tokens of two
kinds: at first 1 answer in 2^H is right. Learning rates are tuned on one grid at each H. PPO and importance weights
equal REINFORCE here: one update per batch, and the actor is the learner.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial

from .studies import argument_parser

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    OPTIONS = argument_parser(__doc__, "terminal").parse_args()

from ..plotting.drawing import keep
from ..plotting.plot import Curve, Plot, Point
from .studies import Row, Study, by_number, curves, percent_table, points, prepare, tell
from .tokens import Frictions, Task, train

NAMES = ("reinforce", "tpo", "dg")
RATES = (3e-4, 1e-3)
LENGTHS: tuple[int, ...] = (7, 8, 9, 10)
STEPS = 600
FINDING = "With one reward at the end DG learns answers of up to 9 tokens, and fails at 10"


def figure(found: Mapping[str, Mapping[str, Point]], finding: str) -> Plot:
    """algorithm → `H=length` → wrong answers in %."""
    return Plot(
        "against",
        finding or "Wrong answers against the length of the answer",
        {"": by_number(found)},
        x="tokens of the answer, H",
        y="wrong answers at the end, %",
        note=f"Token reversal, {STEPS} steps; reward 1 for an answer without a mistake, else 0. At first one answer in "
        "2^H is right.",
    )


def learning(found: Mapping[str, Mapping[str, Sequence[Curve]]], finding: str) -> Plot:
    """`H=length` → algorithm → wrong answers in % over train steps."""
    return Plot("curves", finding or "Wrong answers while learning", found, x="train steps", y="wrong answers, %")


def main(options: argparse.Namespace) -> None:
    prepare()
    lengths, steps, tuning, fresh = ((3, 4), 60, 1, 2) if options.quick else (LENGTHS, STEPS, 2, 5)
    seeds = tuple(range(tuning)), tuple(range(100, 100 + fresh))
    study = Study(options.out, NAMES, RATES, *seeds, tuned_by="token_error")
    rows: list[Row] = []
    for length in lengths:
        task = Task(length=length, terminal=True)
        measure = partial(train, task=task, frictions=Frictions(), steps=steps, every=max(1, steps // 10))
        rows += study.run(f"H={length}", measure, {"task": repr(task), "steps": steps})
    tell(options.out, percent_table(rows, "sequence_error"))
    finding = "" if options.quick else FINDING
    keep(figure(points(rows, "sequence_error", 100), finding), options.out / "terminal.png")
    keep(learning(curves(rows, 1, 100), finding), options.out / "terminal_curves.png")


if __name__ == "__main__":
    main(OPTIONS)
