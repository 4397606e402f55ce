"""Runs for tests, and the files that they leave."""

import itertools
import json
from pathlib import Path

from scripts.train import inline
from tests.forked import Command

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def train(folder: Path, name: str, *overrides: str, config: str = "configs/quickstart.yaml") -> Path:
    """Run a config in this process, to its end; returns the run folder. Raises a role's error."""
    inline(str(REPOSITORY / config), f"run.dir={folder}", f"run.name={name}", *overrides)
    return folder / name


def train_in_processes(folder: Path, name: str, *overrides: str, config: str = "configs/quickstart.yaml") -> Path:
    """Run `scripts.train` to its end, each role a process; returns the run folder."""
    words = ["scripts.train", config, f"run.dir={folder}", f"run.name={name}", *overrides]
    process = Command(words, unused(folder, name))
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return folder / name


def unused(folder: Path, name: str) -> Path:
    """A new file for a command's output."""
    paths = (folder / f"{name}-{number}.said" for number in itertools.count())
    return next(path for path in paths if not path.exists())


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def summary(run: Path) -> dict:
    """The summary, by whose ledger no group is lost."""
    found = json.loads((run / "summary.json").read_text())
    if ledger := found.get("ledger"):
        left = sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
        assert ledger["admitted"] == ledger["trained"] + left + ledger["active"]
    return found
