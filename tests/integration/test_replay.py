"""A recorded run is trained again without actors: bit for bit, or with another loss."""

from pathlib import Path

import pytest

from scripts.following.display import replayed
from tests.integration.runs import rows, summary, train

RECORDED = ["actors.count=1", "run.steps=10", "run.target_reward=null", "eval.prompts=8", "scheduler.max_staleness=2"]


@pytest.mark.integration
def test_a_replay_repeats_the_learner_bit_for_bit(tmp_path: Path) -> None:
    recorded = train(tmp_path, "recorded", *RECORDED, "buffer.keep_journal=true", "checkpoint.every=4")
    again = train(tmp_path, "again", *RECORDED, f"replay={recorded}", "run.steps=99")
    assert [row["loss"] for row in rows(again)] == [row["loss"] for row in rows(recorded)]
    assert [row["grad_norm"] for row in rows(again)] == [row["grad_norm"] for row in rows(recorded)]
    assert summary(again)["weights_digest"] == summary(recorded)["weights_digest"]
    assert summary(again)["staleness_max"] == summary(recorded)["staleness_max"]

    assert replayed(again) == f"the first 11 of 11 versions have the weights of {recorded}"

    other = train(tmp_path, "other", *RECORDED, f"replay={recorded}", "loss=ppo")
    assert rows(other)[0]["reward/mean"] == rows(recorded)[0]["reward/mean"]
    assert summary(other)["weights_digest"] != summary(recorded)["weights_digest"]
    assert not replayed(other).startswith("the first 11 ")
