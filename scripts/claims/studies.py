"""A study tunes every algorithm's learning rate on one grid and measures it with fresh seeds."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ..analysis.intervals import bootstrap, markdown_table
from ..console.arguments import command


class Cell(NamedTuple):
    algorithm: str
    rate: float
    seed: int


Row = dict[str, Any]
"""A measured cell: `condition`, `phase` ("tuning" or "fresh"), `algorithm`, `rate`, `seed`, its numbers."""
Measure = Callable[[Sequence[Cell]], list[dict[str, Any]]]
"""Numbers of cells of one algorithm and rate, in order."""


@dataclass(frozen=True, slots=True)
class Study:
    """The rate with the smallest mean `tuned_by` of tuning seeds 0, 1, ... is used with fresh seeds 100, 101, ..."""

    algorithms: tuple[str, ...]
    rates: tuple[float, ...]
    tuned_by: str
    tuning: int = 2
    fresh: int = 5

    def run(self, condition: str, measure: Measure, rates: Mapping[str, float] | None = None) -> list[Row]:
        """Rows of a condition. `rates`: the algorithms' rates if they were tuned under another one."""
        rows: list[Row] = []

        def measured(phase: str, name: str, rate: float, seeds: range) -> list[Row]:
            cells, named = [Cell(name, rate, seed) for seed in seeds], {"condition": condition, "phase": phase}
            found = [named | cell._asdict() | numbers for cell, numbers in zip(cells, measure(cells), strict=True)]
            rows.extend(found)
            return found

        def error(rate: float, name: str) -> float:
            return fmean(row[self.tuned_by] for row in measured("tuning", name, rate, range(self.tuning)))

        for name in self.algorithms:
            rate = rates[name] if rates else min(self.rates, key=partial(error, name=name))
            measured("fresh", name, rate, range(100, 100 + self.fresh))
        return rows


def percent_table(rows: Sequence[Row], number: str) -> str:
    """`number` of the fresh seeds in %: conditions down, algorithms across, as mean [interval] @ learning rate."""
    fresh = [row for row in rows if row["phase"] == "fresh"]
    algorithms, conditions = (list(dict.fromkeys(row[key] for row in fresh)) for key in ("algorithm", "condition"))

    def cell(name: str, condition: str) -> str:
        here = [row for row in fresh if (row["algorithm"], row["condition"]) == (name, condition)]
        estimate = bootstrap(row[number] for row in here)
        mean, low, high = (100 * min(1.0, max(0.0, value)) for value in (estimate.mean, estimate.low, estimate.high))
        places = 1 if mean >= 10 else 2
        interval = f"{mean:.{places}f} [{low:.{places}f}, {high:.{places}f}]"
        return f"{interval} @{here[0]['rate']:.0e}".replace("e-0", "e-")

    lines = [[condition, *(cell(name, condition) for name in algorithms)] for condition in conditions]
    return f"{number}\n\n{markdown_table(['condition', *algorithms], lines)}"


def write(out: Path, rows: object, *tables: str) -> None:
    """Print the tables and write them to `out/table.md`, and `rows` to `out/rows.json`."""
    out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(tables)
    (out / "table.md").write_text(text, encoding="utf-8")
    (out / "rows.json").write_text(json.dumps(rows, default=str), encoding="utf-8")
    sys.stdout.write(text)


def prepare() -> None:
    """Make many small learners fast in one thread; denormal numbers are slow."""
    import torch  # not at the top: `--help` does not need it

    from areal_like.run.process import prepare_process

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    prepare_process()


def argument_parser(description: str | None, name: str) -> argparse.ArgumentParser:
    parser = command(f"claims.{name}", description)
    parser.add_argument("--quick", action="store_true", help="a short trial; its numbers mean little")
    parser.add_argument("--out", type=Path, default=Path("runs/claims") / name, help="folder for JSON and tables")
    return parser
