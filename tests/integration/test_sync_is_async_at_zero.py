"""Sync mode is async mode with max_staleness=0: bit for bit the same weights and losses.

Tokens are drawn by key, groups are served by slot, and the learner's sums depend on lengths alone. What is left is the
engine's batching: which sequences share a decode step depends on when messages arrive, and rounding in a product of
several rows on how many there are. `engine.batch_invariant` takes that away, so that nothing is left to timing, nor to
the number of actors. (That processes make the same weights as one process: `test_inline`.)
"""

from pathlib import Path

import pytest

from tests.integration.runs import rows, summary, train


@pytest.mark.integration
def test_sync_equals_async_with_max_staleness_0(tmp_path: Path) -> None:
    common = ["engine.batch_invariant=true", "run.steps=8", "run.target_reward=null", "eval.prompts=8", "eval.every=3"]
    common += ["groups_per_batch=4"]
    sync = train(tmp_path, "sync", "mode=sync", "actors.count=2", *common)
    zero = train(tmp_path, "zero", "mode=async", "scheduler.max_staleness=0", "actors.count=1", *common)
    assert len(rows(sync)) == 8
    for ours, theirs in zip(rows(sync), rows(zero), strict=True):
        for name in ("reward/mean", "loss", "grad_norm", "entropy", "kl/k3", "mismatch_max", "tokens"):
            assert ours[name] == theirs[name], f"step {ours['step']}, {name}"
        assert ours["staleness/max"] == theirs["staleness/max"] == 0
    versions = (sync / "published.log").read_text().splitlines()
    assert versions == (zero / "published.log").read_text().splitlines()
    assert [line.split()[0] for line in versions] == [str(version) for version in range(9)]
    assert len({line.split()[1] for line in versions}) == 9, "each step has moved the weights"
    assert summary(sync)["weights_digest"] == summary(zero)["weights_digest"] == versions[-1].split()[1]
