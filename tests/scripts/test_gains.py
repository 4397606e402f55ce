"""Before and after: the first and the last recorded answer of each held-out prompt, in pairs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from areal_like.run.samples import HELDOUT, SampleLog, kept
from areal_like.types import Sample
from scripts import gains
from tests.scripts.written_runs import written_run

PROMPTS = 10


def a_run(folder: Path, before: int, after: int, seed: int = 0, rounds: tuple[int, ...] = (0, 2, 4)) -> Path:
    """A run with `before`, then 0, then `after` right answers out of 10; wrong ones earn a little."""
    run = written_run(folder, f"run.seed={seed}", steps=4)
    (run / "samples" / "heldout.jsonl").unlink()
    log = SampleLog(run, HELDOUT, steps=4, most=None)
    for step in rounds:
        right = {rounds[0]: before, rounds[-1]: after}.get(step, 0)
        for place in range(PROMPTS):
            tokens = np.arange(8 - step, dtype=np.int32)
            reward = 1.0 if place < right else 0.1
            sample = Sample(tokens, 2, np.zeros(6 - step, np.float32), np.ones(6 - step, bool), [(step, 6 - step)],
                            reward, "stop", [])  # fmt: skip
            log.write(kept(HELDOUT, step, step, (place, 0), sample))
    log.close()
    return run


def test_pairs_of_all_seeds_make_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [a_run(tmp_path / f"run-{seed}", 2, after, seed) for seed, after in enumerate((8, 10))]
    found, picture = tmp_path / "found.json", tmp_path / "gains.png"
    assert gains.main([*map(str, runs), "--json", str(found), "--plot", str(picture)]) == 0
    (row,) = json.loads(found.read_text())
    assert row["runs"] == [[0.2, 0.8], [0.2, 1.0]] and row["tokens"] == [[6, 2], [6, 2]]
    assert row["intervals"]["right"][1] == pytest.approx([0.699, 0.972], abs=1e-3), "Wilson's interval of 18 of 20"
    right = row["right"]
    assert (right["prompts"], right["before"], right["after"], right["better"], right["worse"]) == (20, 0.2, 0.9, 14, 0)
    assert right["p"] == pytest.approx(2 / 2**14) and right["test"] == "McNemar"
    assert row["reward"]["before"] == pytest.approx(0.28)
    told = capsys.readouterr().out
    assert "+0.600, +0.800" in told and "< 0.001" in told and "McNemar's exact test" in told
    assert picture.is_file() and json.loads(picture.with_suffix(".json").read_text())["kind"] == "rows"


def test_losses_count_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gains.main([str(a_run(tmp_path / "worse", 5, 1))])
    assert "-0.400 [" in capsys.readouterr().out


def test_a_set_has_its_own_least_reward(tmp_path: Path) -> None:
    change = gains.changes(a_run(tmp_path / "run", 2, 8), {"heldout": 0.05}, 1.0)["heldout"]
    assert change.shares() == (1.0, 1.0)


def test_a_run_that_was_asked_once_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "run", 2, 2, rounds=(0,))
    with pytest.raises(SystemExit):
        gains.main([str(run)])
    assert "asked once only" in capsys.readouterr().err


def test_a_run_that_goes_on_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "run", 2, 8)
    (run / "summary.json").unlink()
    with pytest.raises(SystemExit):
        gains.main([str(run)])
    assert "no run has ended" in capsys.readouterr().err
