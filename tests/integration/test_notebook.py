"""The notebook of the docs runs from top to bottom."""

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.integration
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(ROOT / "docs" / "first_run.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs before you commit"
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert "steps = 60" in first.source
    first.source = first.source.replace("steps = 60", "steps = 6")
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [cell.outputs[-1]["data"]["text/plain"] for cell in notebook.cells if cell.get("outputs")]
    rewards = ast.literal_eval(shown[-1])
    assert rewards.keys() == {"decoupled_ppo", "dg"} and all(0 <= reward <= 1 for reward in rewards.values())
    assert len(list((tmp_path / "runs").iterdir())) == 2
