"""Runs side by side: differences, means over seeds, curves."""

import json
from pathlib import Path

import pytest

from scripts import compare
from tests.scripts.written_runs import written_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    found = [written_run(folder / f"ppo-{seed}", "loss=ppo", f"run.seed={seed}", steps=6) for seed in (0, 1)]
    found.append(written_run(folder / "dg", "loss=dg", steps=4))
    summary = json.loads((found[1] / "summary.json").read_text())
    (found[1] / "summary.json").write_text(json.dumps(summary | {"reward_after": 0.7}))
    return found


def test_seeds_are_taken_together(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([*map(str, runs), "--json", "-"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["settings"]["loss.name"] == "ppo" and first["runs"] == [str(run) for run in runs[:2]]
    measure = first["measures"]["held-out reward"]
    assert (measure["mean"], measure["low"], measure["high"], measure["count"]) == (0.6, 0.5, 0.7, 2)
    assert second["settings"]["loss.name"] == "dg" and second["measures"]["train steps"]["mean"] == 4


def test_runs_that_differ_are_never_taken_for_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However many keys differ between other runs."""
    far = ["mode=sync", "groups_per_batch=4", "sizing.group_size=4", "advantage=rloo", "loss=dg", "eval.every=3"]
    folders = [written_run(tmp_path / "far", *far, steps=2)]
    folders += [written_run(tmp_path / name, f"learner.lr={name}", steps=2) for name in ("1e-3", "1e-4")]
    folders.append(written_run(tmp_path / "longer", "learner.lr=1e-4", steps=3))
    assert compare.main([str(tmp_path), str(folders[0]), "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert sorted(row["runs"] for row in rows) == sorted([str(folder)] for folder in folders), "each once"
    assert {"eval.every", "advantage.name", "run.steps"} <= rows[0]["settings"].keys()
    assert not {"run.seed", "run.name", "run.dir"} & rows[0]["settings"].keys()
