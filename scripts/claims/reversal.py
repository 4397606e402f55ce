"""Claim: under stale, buggy and corrupted actors DG's error is about 10 × lower (arXiv 2603.20521): token reversal.

`python -m scripts.claims.reversal [--quick] [--conditions N] [--out FOLDER]`

Ten tokens of two kinds, the papers' network (`stacks.Shape`), 10 prompts × 10 answers per step, one update by Adam.
Each algorithm's learning rate is tuned on the same grid twice: without frictions, and with all four at once; the first
is used for "clean", the second for every friction. `--conditions` takes the first N of them only:
clean, all four, the middle magnitude of each friction, then the small and large ones.
"""

from __future__ import annotations

import argparse
from functools import partial

from .studies import argument_parser

if __name__ == "__main__":  # first of all, for `--help` needs nothing of what follows
    parser = argument_parser(__doc__, "reversal")
    parser.add_argument("--conditions", type=int, metavar="N", help="only the first N conditions")
    OPTIONS = parser.parse_args()

from ..comparison import plot_bars, plot_curves
from .studies import Row, Study, curves, estimates, percent_tables, prepare, rates_used, tell
from .tokens import Frictions, Task, train

NAMES = ("reinforce", "exact_iw", "ppo", "decoupled_ppo", "pmpo", "tpo", "dg")
RATES = (1e-4, 3e-4, 1e-3)
STEPS = 300
CONDITIONS = {
    "clean": Frictions(),
    "all four": Frictions(staleness=30, bug=0.2, corruption=0.2, discovery=0.03),
    "staleness 30": Frictions(staleness=30),
    "bug .2": Frictions(bug=0.2),
    "corruption .2": Frictions(corruption=0.2),
    "discovery .03": Frictions(discovery=0.03),
    "staleness 10": Frictions(staleness=10),
    "staleness 100": Frictions(staleness=100),
    "bug .05": Frictions(bug=0.05),
    "bug .5": Frictions(bug=0.5),
    "corruption .05": Frictions(corruption=0.05),
    "corruption .5": Frictions(corruption=0.5),
    "discovery .01": Frictions(discovery=0.01),
    "discovery .1": Frictions(discovery=0.1),
}


def main(options: argparse.Namespace) -> None:
    prepare()
    length, steps, tuning, fresh = (3, 40, 1, 2) if options.quick else (10, STEPS, 2, 5)
    task, seeds = Task(length), (tuple(range(tuning)), tuple(range(100, 100 + fresh)))
    study = Study(options.out, NAMES, RATES, *seeds, tuned_by="token_error")
    rows: list[Row] = []
    tuned: dict[str, float] | None = None
    for name, frictions in list(CONDITIONS.items())[: options.conditions]:
        measure = partial(train, task=task, frictions=frictions, steps=steps, every=max(1, steps // 6))
        rows += study.run(name, measure, {"task": repr(task), "frictions": repr(frictions), "steps": steps}, tuned)
        if name == "all four":
            tuned = {algorithm: by[name] for algorithm, by in rates_used(rows).items()}
    tell(options.out, *percent_tables(rows, "sequence_error", "token_error"))
    plot_bars(options.out / "reversal.png", estimates(rows, "token_error"), y="token error")
    plot_curves(options.out / "reversal_curves.png", curves(rows, 2), x="train steps", y="token error")


if __name__ == "__main__":
    main(OPTIONS)
