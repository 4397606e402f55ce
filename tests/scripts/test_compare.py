"""Runs side by side: differences, means over seeds, curves."""

from __future__ import annotations

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


def test_seeds_are_taken_together(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, picture = tmp_path / "table.json", tmp_path / "curves.png"
    assert compare.main([*map(str, runs), "--json", str(table), "--plot", str(picture)]) == 0
    first, second = json.loads(table.read_text())
    assert first["labels"]["loss.name"] == "ppo" and first["runs"] == 2
    measure = first["measures"]["held-out reward"]
    assert (measure["mean"], measure["low"], measure["high"], measure["count"]) == (0.6, 0.5, 0.7, 2)
    assert second["labels"]["loss.name"] == "dg" and second["measures"]["train steps"]["mean"] == 4
    text = capsys.readouterr().out
    assert "1: ppo-0, ppo-1\n2: dg\n" in text
    assert "loss.name" in text and "0.6 [0.5, 0.7]" in text and "▁" in text and "else the range" in text
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_runs_that_differ_are_never_taken_for_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However many keys differ between other runs."""
    far = ["mode=sync", "groups_per_batch=4", "sizing.group_size=4", "sampling.max_new_tokens=9", "advantage=rloo"]
    far += ["loss=dg", "eval.every=3", "learner.weight_decay=0.5"]
    folders = [written_run(tmp_path / "far", *far, steps=2)]
    folders += [written_run(tmp_path / name, f"learner.lr={name}", steps=2) for name in ("1e-3", "1e-4")]
    folders.append(written_run(tmp_path / "longer", "learner.lr=1e-4", steps=3))
    table = tmp_path / "table.json"
    assert compare.main([*map(str, folders), "--json", str(table)]) == 0
    rows = json.loads(table.read_text())
    assert [row["folders"] for row in rows] == [[str(folder)] for folder in folders]
    assert [(row["labels"]["learner.lr"], row["labels"]["run.steps"]) for row in rows[1:]] == [
        ("0.001", "2"), ("0.0001", "2"), ("0.0001", "3"),
    ]  # fmt: skip
    text = capsys.readouterr().out
    assert all(key in text for key in ("eval.every", "advantage.name", "learner.weight_decay")), "all that differs"
    assert len(rows[0]["labels"]) == 6 < len(rows[0]["differs"])


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        compare.main([str(tmp_path)])
    assert ended.value.code == 2 and "no run folder" in capsys.readouterr().err
