"""Studies off policy: which loss and which correction hold when actors are inexact, stale, or broken.

`python -m scripts.claims.off_policy mismatch|offpolicy|corrections|dg_fair [--quick] [--out FOLDER]`

| study | question |
|---|---|
| mismatch | number formats and noise of actors × corrections: reward, collapses, which metric foretells them |
| offpolicy | age of the batches × losses |
| corrections | age and mismatch together × corrections, of decoupled PPO, REINFORCE and DG |
| dg_fair | bonus, own knob and rate of each loss tuned on the same budget: fresh, stale, and with a broken actor |

Hundreds of small learners train side by side (`lagging`), a seed of each method from the same start on the same draws.
Every method is tuned under each condition, on the same number of candidates and on seeds of its own. Tables show means
of fresh seeds with 95 % bootstrap intervals. Differences are paired by seed: a permutation test, with Holm's correction
for the methods of a condition. Killed, the command continues with the condition that it was at.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from .studies import argument_parser

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    parser = argument_parser(__doc__, "off_policy")
    parser.add_argument("study", choices=("mismatch", "offpolicy", "corrections", "dg_fair"))
    OPTIONS = parser.parse_args()

from ..comparison import bootstrap, markdown_table
from ..pairing import paired
from ..plotting.drawing import keep
from ..plotting.plot import Plot, point
from .designs import DESIGNS, Design
from .foretelling import collapsed, foretold
from .lagging import train
from .studies import Row, Study, best_rates, prepare, tell

NUMBERS = {"reward": "Held-out reward at the end", "mean": "Held-out reward, mean over the run"}


def measured(design: Design, options: argparse.Namespace) -> list[Row]:
    """Rows of tuning and of fresh seeds, of every condition; `family` is a method's, or that of its variants."""
    rows: list[Row] = []
    folder = options.out / options.study
    methods = {name: method for family in design.families.values() for name, method in family.items()}
    for label, actor in reversed(list(design.conditions.items())):  # the hardest first
        measure = partial(train, methods=methods, actor=actor, steps=design.steps, every=design.every)
        settings = {"actor": repr(actor), "methods": repr(methods), "steps": design.steps, "every": design.every}
        tuning = Study(folder, tuple(methods), design.rates, design.tuning, (), tuned_by="error")
        tried = tuning.run(f"{label}, tuning", measure, settings)
        rates = best_rates(tried, "error")
        chosen = {family: best_variant(tried, names, rates) for family, names in design.families.items()}
        fresh = replace(tuning, algorithms=tuple(chosen.values()), fresh_seeds=design.fresh)
        rows += [row | {"condition": label} for row in tried]
        families = {name: family for family, name in chosen.items()}
        for row in fresh.run(label, measure, settings, {name: rates[name] for name in chosen.values()}):
            rows.append(row | {"family": families[row["algorithm"]]})
    return rows


def best_variant(tried: Sequence[Row], names: Mapping[str, Any], rates: Mapping[str, float]) -> str:
    """Of the methods `names` that with the least mean error in tuning, at its best rate; of equal ones the first."""

    def error(name: str) -> float:
        return fmean(r["error"] for r in tried if r["algorithm"] == name and r["rate"] == rates[name])

    return min(names, key=error)


@dataclass(frozen=True)
class Found:
    """The rows of a study."""

    design: Design
    rows: Sequence[Row]

    def values(self, condition: str, family: str, number: str) -> list[float]:
        return [r[number] for r in self._of(condition, family)]

    def _of(self, condition: str, family: str) -> list[Row]:
        found = [r for r in self.rows if r.get("family") == family and r["condition"] == condition]
        return sorted(found, key=lambda row: row["seed"])

    def table(self, number: str) -> str:
        """Methods down, conditions across: mean [interval] @ rate, and the variant where there are several."""
        rows = []
        for family, names in self.design.families.items():
            cells = [family]
            for condition in self.design.conditions:
                first = self._of(condition, family)[0]
                said = f", {first['algorithm']}" if len(names) > 1 else ""
                rate = f"{first['rate']:.0e}".replace("e-0", "e-")
                cells.append(f"{bootstrap(self.values(condition, family, number)).text(2)} @{rate}{said}")
            rows.append(cells)
        return markdown_table(["method", *self.design.conditions], rows)

    def by_rate(self) -> str:
        """Mean reward of the tuning seeds at each rate, the lowest first; of families without variants."""
        rows = []
        for family, names in self.design.families.items():
            cells = [family]
            for condition in self.design.conditions:
                tried = [r for r in self.rows if r["algorithm"] in names and r["condition"] == condition]
                tried = [r for r in tried if r["phase"] == "tuning"]
                means = [fmean(r["reward"] for r in tried if r["rate"] == rate) for rate in self.design.rates]
                cells.append(" / ".join(f"{mean:.2f}" for mean in means))
            rows.append(cells)
        return markdown_table(["method", *self.design.conditions], rows)

    def collapses(self) -> str:
        """How many fresh learners ended far below their best."""
        rows = []
        for family in self.design.families:
            fell = [[collapsed(row["curve"]) for row in self._of(c, family)] for c in self.design.conditions]
            rows.append([family, *(f"{sum(each)}/{len(each)}" for each in fell)])
        return markdown_table(["method", *self.design.conditions], rows)

    def signs(self, place: int) -> str:
        """A sign, the mean over the run of fresh learners (place in an entry of the curve)."""
        rows = []
        for family in self.design.families:
            means = [
                bootstrap(fmean(e[place] for e in row["curve"]) for row in self._of(c, family)).mean
                for c in self.design.conditions
            ]
            rows.append([family, *(f"{mean:.2g}" for mean in means)])
        return markdown_table(["method", *self.design.conditions], rows)

    def against(self, number: str) -> str:
        """Every method minus the design's reference: mean difference [interval], and Holm's p under the condition."""
        others = [family for family in self.design.families if family != self.design.reference]
        cells: dict[str, list[str]] = {family: [family] for family in others}
        for condition in self.design.conditions:
            before = self.values(condition, self.design.reference, number)
            found = [paired(before, self.values(condition, family, number)) for family in others]
            for family, one, p in zip(others, found, holm([one.p for one in found]), strict=True):
                cells[family].append(f"{one.difference:+.2f} [{one.low:+.2f}, {one.high:+.2f}] p={p:.2g}")
        return markdown_table([f"minus {self.design.reference}", *self.design.conditions], list(cells.values()))

    def figure(self) -> Plot:
        design = self.design
        panels = {
            condition: {"": [point(family, self.values(condition, family, "reward")) for family in design.families]}
            for condition in design.conditions
        }
        return Plot("rows", design.finding, panels, x=NUMBERS["reward"], note=design.note)


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the given order."""
    order, largest = sorted(range(len(values)), key=values.__getitem__), 0.0
    found = list(values)
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - place) * values[index]))
        found[index] = largest
    return found


def roc(rows: Sequence[Row]) -> str:
    """Which sign foretells a fall, over all learners."""
    found, seen, fallen = foretold(row["curve"] for row in rows)
    lines = [[one.sign, one.before, one.auc.text(2)] for one in found]
    head = f"What foretells a fall: {fallen} of {seen} learners that had learned something fall later\n\n"
    if not found:
        return f"{head}Too few to say.\n"
    return head + markdown_table(["sign", "before a fall it is", "area under the ROC curve"], lines)


def main(options: argparse.Namespace) -> None:
    prepare()
    design = DESIGNS[options.study]
    if options.quick:
        design = replace(design, steps=20, every=5, tuning=design.tuning[:1], fresh=design.fresh[:2])
    rows = measured(design, options)
    found = Found(design, rows)
    tables = [f"{title}\n\n{found.table(number)}" for number, title in NUMBERS.items()]
    tables += [f"Collapses\n\n{found.collapses()}", f"Differences of the reward\n\n{found.against('reward')}"]
    if all(len(names) == 1 for names in design.families.values()):
        tables.append(
            f"Reward of the tuning seeds at the rates {', '.join(map(str, design.rates))}\n\n{found.by_rate()}"
        )
    tables += [f"k3 per token\n\n{found.signs(3)}", f"Rejected tokens\n\n{found.signs(12)}", roc(rows)]
    tell(options.out / options.study, *tables)
    keep(found.figure(), options.out / f"{options.study}.png")


if __name__ == "__main__":
    main(OPTIONS)
