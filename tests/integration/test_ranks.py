"""A run whose learner has two ranks: one of them is killed, the run is gone on with, and it was the run of one rank."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from areal_like import checkpoints
from tests.integration.runs import rows, summary, train
from tests.integration.test_resume import pid_of, start, trained_ids, wait_for_step

RUN = ["run.steps=30", "run.target_reward=null", "eval.every=0", "eval.prompts=4", "learner.publish_dtype=float32"]
RUN += ["groups_per_batch=5", "sizing.group_size=4", "actors.count=1", "checkpoint.every=3", "learner.max_tokens=128"]


@pytest.mark.integration
def test_a_killed_rank_ends_the_run_by_name_and_the_run_gone_on_with_is_that_of_one_rank(tmp_path: Path) -> None:
    run = tmp_path / "two"
    process = start(tmp_path, "two", *RUN, "learner.ranks=2")
    wait_for_step(run, 5, process)
    os.kill(pid_of(run, "learner-1"), signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "error: learner-1 was killed by SIGKILL" in output, output
    checkpoint = checkpoints.latest(run)
    assert checkpoint and sorted(path.name for path in checkpoint[1].glob("*.pt")) == [
        "learner-0-of-2.pt",
        "learner-1-of-2.pt",
    ]

    output, _ = (resumed := start(tmp_path, "two", *RUN, "learner.ranks=2", "resume=auto")).communicate(timeout=120)
    assert resumed.returncode == 0, output
    assert [row["step"] for row in rows(run)] == list(range(1, 31))
    trained = [group_id for batch in trained_ids(run)[:30] for group_id in batch]
    assert sorted(trained) == list(range(5 * 30)), "a prompt was skipped, or trained twice"

    one = train(tmp_path, "one", *RUN, f"replay={run}")
    for alone, together in zip(rows(one), rows(run), strict=True):
        for key in ("loss", "grad_norm", "entropy", "reward/mean", "tokens", "staleness/mean"):
            np.testing.assert_allclose(together[key], alone[key], rtol=1e-3, atol=1e-5, err_msg=key)
    assert summary(one)["steps"] == 30
    ours, theirs = (load_file(each / "checkpoints" / "final" / "model.safetensors") for each in (run, one))
    assert ours.keys() == theirs.keys()
    for name, weights in ours.items():
        np.testing.assert_allclose(weights, theirs[name], rtol=1e-3, atol=1e-4, err_msg=name)
