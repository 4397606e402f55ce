"""Runs for tests, and the files that they leave."""

import json
import subprocess
import sys
from pathlib import Path

from scripts.train import inline

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def train(folder: Path, name: str, *overrides: str, config: str = "configs/quickstart.yaml") -> Path:
    """Run a config in this process, to its end; returns the run folder. Raises what a role raises."""
    inline(str(REPOSITORY / config), f"run.dir={folder}", f"run.name={name}", *overrides)
    return folder / name


def train_in_processes(folder: Path, name: str, *overrides: str, config: str = "configs/quickstart.yaml") -> Path:
    """Run `scripts.train` to its end, each role a process; returns the run folder."""
    command = [sys.executable, "-m", "scripts.train", config, f"run.dir={folder}", f"run.name={name}", *overrides]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / name


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())
