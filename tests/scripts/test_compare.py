"""Runs side by side: differences, means over seeds, curves. Intervals against SciPy and against the truth that they
claim to cover; bands, tables."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from scripts import compare
from scripts.analysis.intervals import CURVE_POINTS, Estimate, band, bootstrap
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


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def test_with_five_seeds_it_holds_the_truth_nearly_as_often_as_it_says() -> None:
    """The plain percentile interval would cover it in 84 % of cases. Each point of a band is a draw of its own."""
    places = range(CURVE_POINTS)
    bands = [band([(places, draw) for draw in draws]) for draws in rng().normal(size=(20, 5, CURVE_POINTS))]
    held = np.mean([(low <= 0) & (high >= 0) for *_, low, high in bands])
    assert 0.90 <= held <= 0.97


def test_a_missing_number_is_left_out_and_counted() -> None:
    found = bootstrap([1.0, None, 3.0, math.nan])
    assert (found.mean, found.n, found.asked) == (2.0, 2, 4)
    assert str(found).endswith("(2 of 4)")
    shown = [bootstrap(values) for values in ([None], [5.0], [0.5, 0.5, 0.5], [0.0, 0.0])]
    assert [str(each) for each in shown] == ["- (0 of 1)", "5.00", "0.500 [0.500, 0.500]", "0.000 [0.000, 0.000]"]
    assert str(Estimate(950.4, -1.26, 2000.0, 3, 3)) == "950 [-1, 2,000]"


def test_a_band_is_the_mean_where_all_curves_are() -> None:
    x, mean, low, _ = band([([0, 10], [0.0, 10.0]), ([0, 5, 20], [2.0, 7.0, 22.0])])
    assert (x[0], x[-1]) == (0, 10)
    assert mean == pytest.approx(x + 1)
    assert low == pytest.approx(x, abs=1e-9)
    assert np.isnan(band([([0, 1], [0, 1])])[2]).all()
