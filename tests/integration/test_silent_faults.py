"""Runs that learn nothing warn first, and then end with the reason."""

import subprocess
import sys
from pathlib import Path

import pytest

from learners.main import NotFinite
from tests.integration.runs import REPOSITORY, train

pytestmark = pytest.mark.integration


SMALL = ["run.target_reward=null", "eval.prompts=0", "groups_per_batch=4"]


def test_a_verifier_that_always_hangs_ends_the_run_with_its_name_and_limit(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "scripts.train",
        "configs/quickstart.yaml",
        "--plain",
        f"run.dir={tmp_path}",
        *SMALL,
    ]
    command += ["task=tests.integration.silent:Hanging", "rewards.timeout=1", "run.steps=1000"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stdout + done.stderr
    words = "answers earned 0: the verifier of task tests.integration.silent:Hanging overran rewards.timeout (1 s)"
    assert words in done.stdout + done.stderr


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
