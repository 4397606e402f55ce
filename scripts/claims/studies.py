"""A study: tunes every algorithm's learning rate on one grid, measures with fresh seeds, and writes JSON, tables and
plots.

`Study.run` computes the cells of one condition at a time and then writes `FOLDER/CONDITION.json`, so an interrupted
study continues with the next condition. The `main` of each claim drives it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from ..analysis.intervals import Estimate, bootstrap, markdown_table
from ..console.arguments import command
from ..plotting.plot import Curve, Point, curve, point


@dataclass(frozen=True, slots=True)
class Cell:
    """One learner."""

    algorithm: str
    rate: float
    seed: int


Row = dict[str, Any]
"""A cell that was measured: `condition`, `phase` ("tuning" or "fresh"), `algorithm`, `rate`, `seed`, its numbers."""
Measure = Callable[[Sequence[Cell]], list[dict[str, Any]]]
"""Numbers of each cell, in order. Cells of an algorithm are neighbours."""


def same_algorithm(cells: Sequence[Cell], most: int | None = None) -> Iterator[tuple[str, slice]]:
    """Neighbours with the same algorithm, as its name and a slice; of at most `most` cells."""
    for name, group in groupby(range(len(cells)), key=lambda place: cells[place].algorithm):
        rows = list(group)
        for start in range(rows[0], rows[-1] + 1, most or len(rows)):
            yield name, slice(start, min(start + (most or len(rows)), rows[-1] + 1))


@dataclass(frozen=True, slots=True)
class Study:
    """`rates` is the grid of all algorithms; the rate with the smallest mean of `tuned_by` over `tuning_seeds` is used.

    No seed is in both `tuning_seeds` and `fresh_seeds`.
    """

    folder: Path
    algorithms: tuple[str, ...]
    rates: tuple[float, ...]
    tuning_seeds: tuple[int, ...]
    fresh_seeds: tuple[int, ...]
    tuned_by: str

    def __post_init__(self) -> None:
        if set(self.tuning_seeds) & set(self.fresh_seeds):
            raise ValueError("learning rates must not be tuned on the seeds that are reported")

    def run(
        self, condition: str, measure: Measure, settings: Mapping[str, Any], rates: Mapping[str, float] | None = None
    ) -> list[Row]:
        """Rows of a condition, from its file if that was made with the same settings.

        `rates`: the algorithms' rates if they were tuned elsewhere; `settings`: everything else that a result depends
        on.
        """
        file = self.folder / f"{condition}.json"
        wanted = json.loads(json.dumps(asdict(self) | {"folder": None, "rates_given": rates} | dict(settings)))
        if file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            if kept["settings"] == wanted:
                return kept["rows"]
        began = time.perf_counter()
        rows: list[Row] = []
        if rates is None:
            cells = [Cell(a, rate, seed) for a in self.algorithms for rate in self.rates for seed in self.tuning_seeds]
            rows = _rows(condition, "tuning", cells, measure(cells))
            rates = best_rates(rows, self.tuned_by)
        cells = [Cell(a, rates[a], seed) for a in self.algorithms for seed in self.fresh_seeds]
        rows += _rows(condition, "fresh", cells, measure(cells))
        seconds = time.perf_counter() - began
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = {"settings": wanted, "seconds": seconds, "rows": rows}
        file.write_text(json.dumps(kept), encoding="utf-8")
        print(f"{condition}: {seconds:.0f} s", flush=True)
        return rows


def one_by_one(measure: Measure, folder: Path, settings: Mapping[str, Any], methods: Mapping[str, Any]) -> Measure:
    """`measure`, each cell by itself and kept in a file of `folder`: a killed study continues with the next cell, and
    seeds or rates can be added. `settings` and its method: what a cell's numbers depend on."""

    def found(cell: Cell) -> dict[str, Any]:
        wanted = json.loads(json.dumps({**settings, "method": repr(methods[cell.algorithm])}))
        file = folder / f"{cell.algorithm} @{cell.rate:g} seed {cell.seed}.json"
        if file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            if kept["settings"] == wanted:
                return kept["found"]
        (one,) = measure([cell])
        folder.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps({"settings": wanted, "found": one}), encoding="utf-8")
        part.replace(file)
        return one

    return lambda cells: [found(cell) for cell in cells]


def _rows(condition: str, phase: str, cells: Sequence[Cell], numbers: Sequence[Mapping[str, Any]]) -> list[Row]:
    named = {"condition": condition, "phase": phase}
    return [named | asdict(cell) | dict(found) for cell, found in zip(cells, numbers, strict=True)]


def best_rates(rows: Iterable[Row], number: str) -> dict[str, float]:
    """Algorithm → the rate whose tuning rows have the smallest mean of `number`; of equal means, the smaller rate."""
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if row["phase"] == "tuning":
            found.setdefault(row["algorithm"], {}).setdefault(row["rate"], []).append(row[number])
    return {name: min(sorted(rates), key=lambda rate: fmean(rates[rate])) for name, rates in found.items()}


def estimates(rows: Iterable[Row], number: str) -> dict[str, dict[str, Estimate]]:
    """algorithm → condition → mean of `number` over fresh seeds with its 95 % bootstrap interval."""
    return {name: {c: bootstrap(values) for c, values in by.items()} for name, by in _fresh(rows, number).items()}


def points(rows: Iterable[Row], number: str, scale: float = 1.0) -> dict[str, dict[str, Point]]:
    """algorithm → condition → `number` × `scale` of the fresh seeds, for a plot."""
    found = _fresh(rows, number)
    return {name: {c: point(c, (scale * v for v in values)) for c, values in by.items()} for name, by in found.items()}


def _fresh(rows: Iterable[Row], number: str) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["phase"] == "fresh":
            found.setdefault(row["algorithm"], {}).setdefault(row["condition"], []).append(row[number])
    return found


def by_number(points: Mapping[str, Mapping[str, Point]]) -> dict[str, list[Point]]:
    """algorithm → points whose x is the number that their condition ends in: 10 for `D=10`."""
    return {
        name: [replace(each, x=float(condition.rpartition("=")[2])) for condition, each in by.items()]
        for name, by in points.items()
    }


def rates_used(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """algorithm → condition → the learning rate of the fresh seeds."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["phase"] == "fresh":
            found.setdefault(row["algorithm"], {})[row["condition"]] = row["rate"]
    return found


def tell(out: Path, *tables: str) -> None:
    """Print the tables and write them to `out/table.md`."""
    out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(tables)
    (out / "table.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def percent_tables(rows: Sequence[Row], *numbers: str) -> list[str]:
    """`percent_table` of each number, headed by its name."""
    return [f"{number}\n\n{percent_table(rows, number)}" for number in numbers]


def percent_table(rows: Sequence[Row], number: str) -> str:
    """Conditions down, algorithms across: `number` in % as mean [interval] @ learning rate."""
    found, rates = estimates(rows, number), rates_used(rows)
    conditions = list(dict.fromkeys(row["condition"] for row in rows))

    def cell(name: str, condition: str) -> str:
        if condition not in found[name]:
            return "-"
        estimate = found[name][condition]
        mean, low, high = (100 * min(1.0, max(0.0, value)) for value in (estimate.mean, estimate.low, estimate.high))
        places = 1 if mean >= 10 else 2
        interval = f"{mean:.{places}f} [{low:.{places}f}, {high:.{places}f}]"
        return f"{interval} @{rates[name][condition]:.0e}".replace("e-0", "e-")

    return markdown_table(["condition", *found], [[c, *(cell(name, c) for name in found)] for c in conditions])


def curves(rows: Iterable[Row], place: int, scale: float = 1.0) -> dict[str, dict[str, list[Curve]]]:
    """condition → algorithm → each fresh seed's `curve`: number `place` of each entry × `scale` over number 0."""
    found: dict[str, dict[str, list[Curve]]] = {}
    for row in rows:
        if row["phase"] == "fresh":
            x, y = [entry[0] for entry in row["curve"]], [scale * entry[place] for entry in row["curve"]]
            found.setdefault(row["condition"], {}).setdefault(row["algorithm"], []).append(curve(x, y))
    return found


def prepare() -> None:
    """Make many small learners fast in one thread: keep memory, and flush denormal numbers to 0, on which processors
    are many times slower."""
    import torch  # not at the top: `--help` does not need it

    from areal_like.run.process import prepare_memory

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    prepare_memory()


def argument_parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """With `--quick` and `--out FOLDER`, which every claim has."""
    parser = command(f"claims.{out}", description)
    parser.add_argument("--quick", action="store_true", help="a short trial; its numbers mean little")
    parser.add_argument("--out", type=Path, default=Path("runs/claims") / out, help="folder for JSON, table and plot")
    return parser


def publishable(description: str | None, out: str) -> argparse.ArgumentParser:
    """With `--publish` too: the study's tables in the documentation are made from its `results.csv`."""
    parser = argument_parser(description, out)
    parser.add_argument("--publish", action="store_true", help="keep results.csv for the tables of the documentation")
    return parser
