"""Sync mode is async mode with max_staleness=0: the same losses, step for step, from real processes.

Tokens are drawn by key, so the two runs sample the same ones. Which sequences share a decode step depends on when
messages arrive; the rounding of batched matrix products, and with it the last bits of the logprobs, may follow.
"""

from pathlib import Path

import pytest

from tests.integration.runs import rows, summary, train


@pytest.mark.integration
def test_sync_equals_async_with_max_staleness_0(tmp_path: Path) -> None:
    common = ["actors.count=1", "run.steps=12", "run.target_reward=null", "eval.prompts=0"]
    sync = train(tmp_path, "sync", "mode=sync", *common)
    zero = train(tmp_path, "zero", "mode=async", "scheduler.max_staleness=0", *common)
    assert len(rows(sync)) == 12
    for ours, theirs in zip(rows(sync), rows(zero), strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"], f"step {ours['step']}: other tokens were sampled"
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert ours["staleness/max"] == theirs["staleness/max"] == 0
    equal = summary(sync)["weights_digest"] == summary(zero)["weights_digest"]
    print("the final weights are", "bit-equal" if equal else "equal up to rounding")
