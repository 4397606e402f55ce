"""Runs from Python, without starting one: the command's arguments, and the reading of a folder."""

from collections import deque
from pathlib import Path

import numpy as np
import pytest

import areal_like as al
from areal_like.config import run_config as configs
from areal_like.config.run_config import ConfigError
from areal_like.run import api as run


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of the command; instead of running it, a folder is made."""
    found: list[str] = []

    def follow(command: list[str], quiet: bool) -> tuple[int, deque[str]]:
        found[:] = command[3:-1]
        config = configs.load(found)
        folder = Path(config.run.dir) / str(config.run.name)
        folder.mkdir(parents=True)
        configs.save(config, folder / "config.yaml")
        return 0, deque()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "_follow", follow)
    return found


def test_values_are_those_of_python(called: list[str], tmp_path: Path) -> None:
    made = al.train(
        "quickstart", {"run.dir": tmp_path / "here", "learner.lr": np.float32(0.5), "run.steps": np.int64(3)}
    )
    assert made.folder.parent == tmp_path / "here" and "run.steps=3" in called and "learner.lr=0.5" in called
    with pytest.raises(ConfigError, match="a value of a config is a number"):
        al.train("quickstart", {"run.steps": object()})
    with pytest.raises(ConfigError, match=r"unknown key 'run.stepz'.*\[from the overrides\]"):
        al.train("quickstart", {"run.stepz": 3})
    made = al.train("quickstart", {"run.name": None})
    assert made.folder.name.startswith("quickstart-2") and list(made.samples("dropped")) == []
    with pytest.raises(ValueError, match="'trained', 'dropped', 'heldout'"):
        made.samples("dropt")  # type: ignore[arg-type]
