"""What a study off policy found: its `results.csv`, and the tables and pictures that are made from that file alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..analysis.aggregates import Scores, holm, improvement, iqm, pairwise, profile
from ..analysis.intervals import bootstrap, markdown_table
from ..analysis.pairing import paired
from ..plotting.plot import Plot, Point, point
from . import kept
from .designs import Design
from .foretelling import collapsed
from .lagging import SIGNS, Method, passes
from .studies import Row

NUMBERS = {
    "reward": "Held-out reward at the end",
    "equal_compute": "Held-out reward at equal compute",
    "mean": "Held-out reward, mean over the run",
}
NAMED = ("phase", "condition", "family", "algorithm", "rate", "seed")
MEASURED = ("reward", "equal_compute", "mean", "fell", "k3", "rejected")
"""Columns of `results.csv`. `fell`: 1 if the learner ended far below its best; k3 per token and the share of rejected
tokens are means over the run."""
COLUMNS = (*NAMED, *MEASURED)
K3, REJECTED = (3 + SIGNS.index(name) for name in ("kl", "rejected"))
THRESHOLDS = [place / 20 for place in range(5, 21)]
"""Of the performance profiles; chance earns .25."""


def numbers_of(rows: Iterable[Mapping[str, Any]], methods: Mapping[str, Method]) -> list[Row]:
    """Rows of training, with their curves, as rows of `results.csv`."""
    cost = {name: passes(method) for name, method in methods.items()}
    least, found = min(cost.values()), list[Row]()
    for row in rows:
        curve = row["curve"]
        measured = {
            "reward": row["reward"],
            "equal_compute": at_step(curve, curve[-1][0] * least / cost[row["algorithm"]]),
            "mean": row["mean"],
            "fell": int(collapsed(curve)),
            "k3": fmean(entry[K3] for entry in curve),
            "rejected": fmean(entry[REJECTED] for entry in curve),
        }
        found.append({name: row[name] for name in NAMED} | measured)
    return found


def at_step(curve: Sequence[Sequence[float]], step: float) -> float:
    """The held-out reward of the last look by this step; of the first one if there is none."""
    return next((entry[1] for entry in reversed(curve) if entry[0] <= step), curve[0][1])


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    kept.write(path, COLUMNS, rows)


def read_csv(path: Path) -> list[Row]:
    """Raises OSError, ValueError."""
    return kept.read(path, COLUMNS, texts=("phase", "condition", "family", "algorithm"))


def _knobs(algorithm: str, family: str) -> str:
    """`clip 0.2 β 0` of `ppo clip 0.2 β 0`."""
    words = algorithm.replace(",", "").split()
    while words and words[0] in family.replace(",", "").split():
        words.pop(0)
    return " ".join(words)


@dataclass(frozen=True)
class Found:
    """The rows of a study's `results.csv`."""

    design: Design
    rows: Sequence[Row]

    @functools.cached_property
    def conditions(self) -> list[str]:
        """Those of the design that have been measured."""
        there = {row["condition"] for row in self.rows}
        return [condition for condition in self.design.conditions if condition in there]

    def _of(self, condition: str, family: str, phase: str = "fresh") -> list[Row]:
        return self._by_cell.get((family, condition, phase), [])

    @functools.cached_property
    def _by_cell(self) -> dict[tuple[str, str, str], list[Row]]:
        """Method, condition and phase → rows by seed."""
        found: dict[tuple[str, str, str], list[Row]] = {}
        for row in sorted(self.rows, key=lambda row: row["seed"]):
            found.setdefault((row["family"], row["condition"], row["phase"]), []).append(row)
        return found

    def values(self, condition: str, family: str, number: str) -> list[float]:
        return [row[number] for row in self._of(condition, family)]

    def scores(self, family: str, number: str) -> Scores:
        return {condition: self.values(condition, family, number) for condition in self.conditions}

    # Tables

    def _across(self, head: str, cell: Callable[[str, str], str], families: Iterable[str] = ()) -> str:
        """Methods down, conditions across."""
        conditions = self.conditions
        rows = [[f, *(cell(c, f) for c in conditions)] for f in families or self.design.families]
        return markdown_table([head, *conditions], rows)

    def table(self, number: str) -> str:
        """Mean [interval] @ rate, and the variant where there are several."""

        def cell(condition: str, family: str) -> str:
            first = self._of(condition, family)[0]
            said = f", {_knobs(first['algorithm'], family)}" if self._several else ""
            rate = f"{first['rate']:.0e}".replace("e-0", "e-")
            return f"{bootstrap(self.values(condition, family, number)).text(2)} @{rate}{said}"

        return self._across("method", cell)

    @property
    def _several(self) -> bool:
        return any(len(names) > 1 for names in self.design.families.values())

    def by_rate(self) -> str:
        """Mean reward of the tuning seeds at each rate, the lowest first; of variants the best at that rate."""

        def cell(condition: str, family: str) -> str:
            tried: dict[float, dict[str, list[float]]] = {rate: {} for rate in self.design.rates}
            for row in self._of(condition, family, "tuning"):
                tried[row["rate"]].setdefault(row["algorithm"], []).append(row["reward"])
            return " / ".join(f"{max(map(fmean, each.values())):.2f}" for each in tried.values())

        return self._across("method", cell)

    def falls(self) -> str:
        """How many fresh learners ended far below their best."""

        def cell(condition: str, family: str) -> str:
            fell = self.values(condition, family, "fell")
            return f"{sum(fell):.0f}/{len(fell)}"

        return self._across("method", cell)

    def signs(self, number: str) -> str:
        return self._across("method", lambda c, f: f"{fmean(self.values(c, f, number)):.2g}")

    def against(self, number: str) -> str:
        """Every method minus the design's reference: mean difference [interval], and Holm's p under the condition."""
        others = [family for family in self.design.families if family != self.design.reference]
        cells: dict[tuple[str, str], str] = {}
        for condition in self.conditions:
            before = self.values(condition, self.design.reference, number)
            pairs = [paired(before, self.values(condition, family, number)) for family in others]
            for family, one, p in zip(others, pairs, holm([one.p for one in pairs]), strict=True):
                cells[condition, family] = f"{one.difference:+.2f} [{one.low:+.2f}, {one.high:+.2f}] p={p:.2g}"
        return self._across(f"minus {self.design.reference}", lambda c, f: cells[c, f], others)

    def overall(self) -> str:
        """All conditions together, the best first: interquartile means, and the chance of beating the reference."""
        rows = []
        for family in self.design.families:
            cells = [iqm(self.scores(family, number)) for number in NUMBERS]
            cells.append(improvement(self.scores(family, "reward"), self.scores(self.design.reference, "reward")))
            rows.append((cells[0].mean, [family, *(cell.text(2) for cell in cells)]))
        head = ["method", "IQM at the end", "at equal compute", "mean over the run"]
        head.append(f"better than {self.design.reference}")
        return markdown_table(head, [row for _, row in sorted(rows, key=lambda row: -row[0])])

    def pairs(self) -> str:
        """Every method (down) minus every other (across): a seed's mean reward over the conditions; p by Holm over all
        pairs."""
        names = list(self.design.families)
        means: dict[str, dict[int, float]] = {}
        for family in names:
            seeds: dict[int, list[float]] = {}
            for condition in self.conditions:
                for row in self._of(condition, family):
                    seeds.setdefault(row["seed"], []).append(row["reward"])
            means[family] = {seed: fmean(values) for seed, values in seeds.items()}
        cells = {(pair.second, pair.first): pair for pair in pairwise(means)}

        def cell(down: str, across: str) -> str:
            pair = cells.get((down, across))
            return f"{pair.found.difference:+.2f}{'*' if pair.p < 0.05 else ''}" if pair else ""

        return markdown_table(["minus", *names[:-1]], [[d, *(cell(d, a) for a in names[:-1])] for d in names[1:]])

    def tables(self) -> dict[str, str]:
        """Title → table."""
        found = {title: self.table(number) for number, title in NUMBERS.items()}
        found |= {"All conditions together": self.overall(), "Every pair": self.pairs()}
        found |= {"Collapses": self.falls(), "Differences of the reward": self.against("reward")}
        rates = ", ".join(f"{rate:g}" for rate in self.design.rates)
        return found | {
            f"Reward of the tuning seeds at the rates {rates}": self.by_rate(),
            "k3 per token": self.signs("k3"),
            "Rejected tokens": self.signs("rejected"),
        }

    # Pictures

    def figure(self) -> Plot:
        """Final rewards: cells where conditions are ages × mismatches, else a row per method."""
        design = self.design
        if not all(", η = " in condition for condition in self.conditions):
            panels = {
                c: {"": [point(f, self.values(c, f, "reward")) for f in design.families]} for c in self.conditions
            }
            return Plot("rows", design.finding, panels, x=NUMBERS["reward"], note=design.note)
        places: dict[str, dict[str, list[Point]]] = {}
        for condition in self.conditions:
            panel, _, age = condition.rpartition(", η = ")
            for family in design.families:
                here = places.setdefault(panel, {}).setdefault(family, [])
                here.append(point(float(age), self.values(condition, family, "reward")))
        return Plot("cells", design.finding, places, x="age of the batches η, in versions", note=design.note)

    def profiles(self) -> Plot:
        """The share of all runs above each reward."""
        panel = {}
        for family in self.design.families:
            shares = profile(self.scores(family, "reward"), THRESHOLDS)
            panel[family] = [Point(at, share) for at, share in zip(THRESHOLDS, shares, strict=True)]
        title = f"Performance profiles: {self.design.finding}"
        return Plot(
            "against",
            title,
            {"": panel},
            x="held-out reward τ",
            y="share of runs above τ, all conditions",
            note=self.design.note,
            replicates="runs",
            even=True,
        )
