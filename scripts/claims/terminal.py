"""Claim: with one reward at the end of a long answer DG fails (arXiv 2604.06159, of TPO's authors).

`python -m scripts.claims.terminal [--quick] [--out FOLDER]`

Token reversal without frictions, reward 1 for an answer without a mistake and 0 otherwise, H = 7 to 10 tokens of two
kinds: at first 1 answer in 2^H is right. Learning rates are tuned on one grid at each H. PPO and importance weights
equal REINFORCE here: one update per batch, and the actor is the learner.
"""

from __future__ import annotations

import argparse
from functools import partial

from .studies import argument_parser

if __name__ == "__main__":  # first of all, for `--help` needs nothing of what follows
    OPTIONS = argument_parser(__doc__, "terminal").parse_args()

from ..comparison import plot_bars, plot_curves
from .studies import Row, Study, curves, estimates, percent_table, prepare, tell
from .tokens import Frictions, Task, train

NAMES = ("reinforce", "tpo", "dg")
RATES = (3e-4, 1e-3)
LENGTHS: tuple[int, ...] = (7, 8, 9, 10)
STEPS = 600


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
    plot_bars(options.out / "terminal.png", estimates(rows, "sequence_error"), y="sequence error")
    plot_curves(options.out / "terminal_curves.png", curves(rows, 1), x="train steps", y="sequence error")


if __name__ == "__main__":
    main(OPTIONS)
