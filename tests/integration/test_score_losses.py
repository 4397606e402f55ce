"""`examples/score_losses.py` on a real recorded run."""

from pathlib import Path

import pytest
import torch

from examples.score_losses import main
from tests.integration.runs import train

SMALL = ["run.steps=2", "run.target_reward=null", "eval.prompts=4", "eval.every=0", "buffer.keep_journal=true"]


@pytest.mark.integration
def test_losses_on_a_recorded_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, "run", *SMALL, "actors.count=1", "groups_per_batch=6", "sizing.group_size=4")
    found = main([str(run), "--loss", "reinforce", "--loss", "tis", "--loss", "dg"])
    assert list(found) == ["reinforce", "tis", "dg"] and found["dg"].shape[0] == 2
    fresh = torch.cosine_similarity(found["reinforce"][0], found["tis"][0], dim=0)
    assert fresh > 0.99, "the first batch comes from the learner's own weights"
    assert not torch.equal(found["reinforce"][1], found["dg"][1]) and "cosines" in capsys.readouterr().out
