"""`scripts.score` on a real recorded run: along its training, and at held weights."""

import json
from pathlib import Path

import pytest

from scripts.score import main
from tests.integration.runs import summary, train

SMALL = ["run.steps=3", "run.target_reward=null", "eval.prompts=4", "inject_staleness=2", "eval.every=0"]
SMALL += ["actors.count=1", "groups_per_batch=6", "sizing.group_size=4"]


@pytest.mark.integration
def test_a_recorded_run_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, "run", *SMALL, "buffer.keep_journal=true", config="configs/copy4.yaml")
    assert [result["version"] for result in summary(run)["evaluations"]] == [0, 3]
    assert main([str(run)]) == 0
    found = json.loads((run / "score" / "score.json").read_text())
    assert found["repeated"] is True and found["batches"] == 3
    assert len(found["cosine"]["all"]) == len(found["losses"]) == len(found["by_loss"]) >= 15
    fresh = found["by_loss"]["decoupled_ppo"]["staleness 0"]
    assert fresh["ess"]["mean"] == pytest.approx(1.0, abs=1e-3), "the first batch comes from the learner's own weights"
    assert found["by_loss"]["is_pg"]["staleness 2–3"]["ess"]["mean"] < 0.999

    few = ["--loss", "ppo", "--loss", "reinforce", "--batches", "2", "--out", str(tmp_path / "held")]
    norms = {}
    for weights in ("initial", "newest"):
        assert main([str(run), "--weights", weights, *few]) == 0
        held = json.loads((tmp_path / "held" / "score.json").read_text())
        assert held["batches"] == 2 and list(held["losses"]) == ["ppo", "reinforce"]
        norms[weights] = held["by_loss"]["reinforce"]["all"]["norm"]["mean"]
    assert norms["initial"] != norms["newest"]
    assert main([str(run), "--loss", "pppo"]) == 2
    assert "'pppo'" in capsys.readouterr().err


def test_what_cannot_be_scored_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 2
    assert "no run folder" in capsys.readouterr().err
