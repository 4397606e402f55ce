"""The notebook of the docs runs from top to bottom."""

import json
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from areal_like.run import api
from tests.forked import Command

ROOT = Path(__file__).resolve().parents[2]


def follow(command: list[str], quiet: bool) -> tuple[int, deque[str]]:
    """Run it as `al.train` does, forked from the session's server: its two runs would each import torch."""
    assert command[:2] == [sys.executable, "-m"]
    process = Command(command[2:], Path("output"))
    return process.wait(200), deque([process.text()])


@pytest.mark.integration
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(api, "_follow", follow)
    notebook = json.loads((ROOT / "docs" / "first_run.ipynb").read_text())
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "clear the outputs before you commit"
    first, *others = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert "steps = 60" in first
    names: dict[str, Any] = {}
    for source in (first.replace("steps = 60", "steps = 6"), *others):
        exec(source, names)
    shown = eval(others[-1].splitlines()[-1], names)
    assert shown.keys() == {"decoupled_ppo", "dg"} and all(0 <= reward <= 1 for reward in shown.values())
    assert len(list((tmp_path / "runs").iterdir())) == 2
