"""Claim: under stale, buggy and corrupted actors DG's error is about 10 × lower (arXiv 2603.20521): token reversal.

`python -m scripts.claims.reversal [--quick] [--conditions N] [--out FOLDER]`

Ten tokens of two kinds, the papers' network (`stacks.Shape`), 10 prompts × 10 answers per step, one update by Adam.
Each algorithm's learning rate is tuned on the same grid twice: without frictions, and with all four at once; the first
is used for "clean", the second for every friction. `--conditions` takes the first N of them only:
clean, all four, the middle magnitude of each friction, then the small and large ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial

from .studies import argument_parser

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    parser = argument_parser(__doc__, "reversal")
    parser.add_argument("--conditions", type=int, metavar="N", help="only the first N conditions")
    OPTIONS = parser.parse_args()

from ..plotting.drawing import keep
from ..plotting.plot import Curve, Plot, Point
from .studies import Row, Study, curves, percent_tables, points, prepare, rates_used, tell
from .tokens import Frictions, Task, train

NAMES = ("reinforce", "exact_iw", "ppo", "decoupled_ppo", "pmpo", "tpo", "dg")
RATES = (1e-4, 3e-4, 1e-3)
STEPS = 300
RATIO = 10.0
"""The claimed error of other algorithms, over DG's."""
FINDING = "“About 10 × lower error with DG” holds in 14 of these 84 comparisons"
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


def figure(found: Mapping[str, Mapping[str, Point]], finding: str) -> Plot:
    """algorithm → condition → error per token in %: DG beside each of the others."""
    panels = {
        f"dg and {name}": {"dg": list(found["dg"].values()), name: list(by.values())}
        for name, by in found.items()
        if name != "dg"
    }
    return Plot(
        "rows",
        finding or "Error per token of DG beside that of each other algorithm",
        panels,
        x="error per token at the end, % (logarithmic)",
        log=True,
        ratio=RATIO,
        note=f"Bold: error at least {RATIO:.0f} × that of DG; bars that leave the picture reach 0. Staleness: weights "
        "up to this many updates old. Bug: share of broken answers. Corruption: share of random rewards. Discovery: "
        f"share of answers that are given. Token reversal, 10 tokens, {STEPS} steps; learning rates tuned without "
        "frictions (clean) and with all four at once (the others).",
    )


def learning(found: Mapping[str, Mapping[str, Sequence[Curve]]], finding: str) -> Plot:
    """condition → algorithm → error per token in % over train steps."""
    return Plot("curves", finding or "Error per token while learning", found, x="train steps", y="error per token, %")


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
    finding = "" if options.quick or options.conditions else FINDING
    keep(figure(points(rows, "token_error", 100), finding), options.out / "reversal.png")
    keep(learning(curves(rows, 2, 100), finding), options.out / "reversal_curves.png")


if __name__ == "__main__":
    main(OPTIONS)
