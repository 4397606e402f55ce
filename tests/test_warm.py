"""The tests' common fork server has the project imported; without, each run would start a server of its own, slowly."""

import os
from pathlib import Path

import pytest

from areal_like.launch import forks
from tests.forked import forked, said


def test_forks_have_the_project_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if forks.VARIABLE not in os.environ:
        pytest.skip("these tests share no fork server: they are too few, or start no runs")
    (tmp_path / "a_look.py").write_text(
        "import sys\nprint('learners.learner' in sys.modules, 'learners.main' in sys.modules)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with forked("a_look", [[]], tmp_path) as (process,):
        assert process.wait(60) == 0, said(tmp_path)
    assert said(tmp_path).split()[-2:] == ["True", "False"]
