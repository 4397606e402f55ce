"""A recorded run, trained on again without actors: bit for bit, or under another loss."""

from pathlib import Path

import pytest

from tests.integration.runs import rows, summary, train

RECORDED = ["run.steps=10", "run.target_reward=null", "eval.prompts=8", "scheduler.max_staleness=2"]


@pytest.mark.integration
def test_a_replay_repeats_the_learner_bit_for_bit(tmp_path: Path) -> None:
    recorded = train(tmp_path, "recorded", *RECORDED, "buffer.keep_journal=true", "checkpoint.every=4")
    again = train(tmp_path, "again", *RECORDED, f"replay={recorded}", "run.steps=99")
    assert [row["loss"] for row in rows(again)] == [row["loss"] for row in rows(recorded)]
    assert [row["grad_norm"] for row in rows(again)] == [row["grad_norm"] for row in rows(recorded)]
    assert summary(again)["weights_digest"] == summary(recorded)["weights_digest"]
    assert summary(again)["staleness_max"] == summary(recorded)["staleness_max"]

    other = train(tmp_path, "other", *RECORDED, f"replay={recorded}", "loss=ppo")
    assert rows(other)[0]["reward/mean"] == rows(recorded)[0]["reward/mean"]
    assert summary(other)["weights_digest"] != summary(recorded)["weights_digest"]
