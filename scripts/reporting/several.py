"""Several runs on one page: which runs they are, how they differ, and how they compare.

An ablation's folder has its factors and measures in `results.csv`. Of other runs the factors are the keys of their
configs that differ.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_like.config.registry import ConfigError
from areal_like.config.run_config import read_resolved
from areal_like.run.run_folder import CONFIG, config_file

from ..analysis.intervals import FEWEST_FOR_INTERVALS, bootstrap
from .contents import leaves
from .series import short

SEED = "run.seed"
MOST_FACTORS = 6
"""Differing keys shown for runs that are no ablation; more if that many are needed to tell all settings apart."""
UNTELLING = ("run.", "buffer.", "checkpoint.", "security.", "launcher.", "replay", "resume")
"""Prefixes of keys that change how a run is stored or started, not what it does,"""
TELLING = ("run.steps", "run.target_reward")
"""except these."""
MEASURES = {
    "held-out reward": "reward_after",
    "train steps": "steps",
    "seconds": "seconds",
    "mean staleness": "staleness_mean",
    "trained tokens per second": "trained_tokens_per_second",
}
"""For runs that are no ablation: name → key of the summary."""


@dataclass
class Member:
    """A run, and how it differs from the others. `labels`: factor → label; enough of all differing keys (`differs`) to
    tell the settings apart. `measures` are known for runs of an ablation."""

    run: Path
    labels: dict[str, str] = field(default_factory=dict)
    seed: str = ""
    measures: dict[str, float] | None = None
    differs: dict[str, str] = field(default_factory=dict)


def members(paths: Iterable[Path]) -> list[Member]:
    """The runs that some folders are or hold. Raises ConfigError for a folder without any."""
    found = [member for path in paths for member in _members(path)]
    once = list({member.run.resolve(): member for member in found}.values())
    if len(once) > 1 and not any(member.labels for member in once):
        _label(once)
    factors = dict.fromkeys(factor for member in once for factor in member.labels)
    for member in once:
        member.labels = {factor: member.labels.get(factor, "-") for factor in factors}
    return once


def _members(path: Path) -> list[Member]:
    if (path / CONFIG).is_file():
        return [Member(path)]
    table = path / "results.csv"
    found = list(_of_ablation(path, table)) if table.is_file() else []
    if not found:
        folders = [each for place in (path, path / "runs") if place.is_dir() for each in sorted(place.iterdir())]
        found = [Member(folder) for folder in folders if (folder / CONFIG).is_file()]
    if not found:
        raise ConfigError(f"{path}: no run folder ({CONFIG} is missing), nor a folder with runs or an ablation in it")
    return found


def _of_ablation(path: Path, table: Path) -> Iterable[Member]:
    """The main runs of `results.csv`: stage, factors, seed, measures, run."""
    with table.open(newline="") as file:
        reader = csv.DictReader(file)
        names = list(reader.fieldnames or ())
        if not {"stage", "seed", "run"} <= set(names):
            return
        factors, measures = names[1 : names.index("seed")], names[names.index("seed") + 1 : names.index("run")]
        for row in reader:
            run = path / "runs" / row["run"]
            if row["stage"] == "main" and (run / CONFIG).is_file():
                values = {name: float(row[name]) for name in measures if row[name]}
                labels = {name: row[name] for name in factors if not name.startswith("tuned ")}
                yield Member(run, labels, row["seed"], values)


def _label(found: Sequence[Member]) -> None:
    """Label runs by the keys that differ."""
    each = [_known(member.run) for member in found]
    keys = dict.fromkeys(key for one in each for key in one)
    differ = [key for key in keys if len({one.get(key) for one in each}) > 1]
    differ = [key for key in differ if key in TELLING or not key.startswith(UNTELLING)]
    chosen = _enough([{key: one.get(key, "-") for key in differ} for one in each])
    for member, one in zip(found, each, strict=True):
        member.seed = one.get(SEED, "")
        member.differs = {key: one.get(key, "-") for key in differ}
        member.labels = {key: label for key, label in member.differs.items() if key in chosen}


def _enough(settings: Sequence[Mapping[str, str]]) -> set[str]:
    """Keys that tell all settings apart, then others up to MOST_FACTORS; the first that do."""
    keys = list(settings[0])
    chosen: list[str] = []
    for key in keys:
        with_it = {tuple(each[name] for name in (*chosen, key)) for each in settings}
        if len(with_it) > len({tuple(each[name] for name in chosen) for each in settings}):
            chosen.append(key)
    others = [key for key in keys if key not in chosen]
    return {*chosen, *others[: max(0, MOST_FACTORS - len(chosen))]}


def _known(run: Path) -> dict[str, str]:
    return {key: str(value) for key, value in leaves(read_resolved(config_file(run))).items()}


def changes(first: list[list[Any]], other: list[list[Any]]) -> list[list[Any]]:
    """Changes from the settings of the first run (`contents.settings`) to another's: rows, or [key] for a key that
    the other does not have. Most runs of a study share nearly all."""
    known, keys = {tuple(row) for row in first}, {row[0] for row in other}
    return [row for row in other if tuple(row) not in known] + [[row[0]] for row in first if row[0] not in keys]


def table(found: Sequence[Member], measures: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """A row per point (runs that differ in nothing but the seed): its labels, and of each measure the mean, an interval
    if there are enough seeds (else the range), and the number of runs that have it."""
    points: dict[tuple[str, ...], list[Mapping[str, float]]] = {}
    for member, its in zip(found, measures, strict=True):
        points.setdefault(tuple(member.labels.values()), []).append(its)
    rows = []
    for key, runs in points.items():
        names = dict.fromkeys(name for run in runs for name in run)
        labels = dict(zip(found[0].labels, key, strict=True))
        rows.append({"labels": labels, "runs": len(runs), "measures": {n: _estimate(runs, n) for n in names}})
    return rows


def measured(member: Member, summary: Mapping[str, Any]) -> dict[str, float]:
    """The measures that a run has."""
    if member.measures is not None:
        return member.measures
    known = {name: summary.get(key) for name, key in MEASURES.items()}
    return {name: float(value) for name, value in known.items() if isinstance(value, int | float)}


def _estimate(runs: Sequence[Mapping[str, float]], name: str) -> dict[str, Any]:
    values = [run[name] for run in runs if name in run and math.isfinite(run[name])]
    if len(values) >= FEWEST_FOR_INTERVALS:
        found = bootstrap(values)
        return {"mean": short(found.mean), "low": short(found.low), "high": short(found.high), "count": len(values)}
    if not values:
        return {"mean": None, "count": 0}
    mean = sum(values) / len(values)
    return {"mean": short(mean), "low": short(min(values)), "high": short(max(values)), "count": len(values)}
