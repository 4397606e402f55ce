"""Runs that learn nothing warn first, and then end with the reason."""

from pathlib import Path

import pytest

from learners.main import NotFinite
from tests.forked import Command
from tests.integration.runs import train

pytestmark = pytest.mark.integration


SMALL = ["run.target_reward=null", "eval.prompts=0", "groups_per_batch=4"]


def test_a_verifier_that_always_hangs_ends_the_run_with_its_name_and_limit(tmp_path: Path) -> None:
    words = ["scripts.train", "configs/quickstart.yaml", "--plain", f"run.dir={tmp_path}", *SMALL]
    words += ["task=tests.integration.silent:Hanging", "rewards.timeout=1", "run.steps=1000"]
    process = Command(words, tmp_path / "said")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 1, said
    reason = "answers earned 0: the verifier of task tests.integration.silent:Hanging overran rewards.timeout (1 s)"
    assert reason in said


def test_a_loss_that_is_nan_at_every_step_ends_the_run_with_the_last_good_checkpoint(tmp_path: Path) -> None:
    more = [
        "loss=tests.integration.silent:broken_later",
        "run.max_nonfinite=4",
        "checkpoint.every=1",
        "checkpoint.keep=9",
    ]
    with pytest.raises(
        NotFinite, match=r"4 train steps in a row \(run.max_nonfinite\), the last of them step 6,"
    ) as caught:
        train(tmp_path, "silent", *SMALL, *more)
    assert f"{tmp_path / 'silent' / 'checkpoints' / 'step-00000002'}. Fix the loss, or lower" in str(caught.value)
