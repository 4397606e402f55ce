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


@pytest.mark.integration
def test_encoding_beside_training_changes_no_bit(tmp_path: Path) -> None:
    """The same batches, with weights encoded while training continues, and with a learner that waits; the model is
    large enough for a thread of its own."""
    model = ["model.hidden_size=192", "model.intermediate_size=384", "learner.lr=1e-5"]
    config = [*model, "run.steps=4", "run.target_reward=null", "eval.prompts=4", "eval.every=0", "groups_per_batch=2"]
    config += ["actors.count=1"]
    recorded = train(tmp_path, "recorded", *config, "buffer.keep_journal=true")
    runs = {
        overlap: train(tmp_path, f"overlap-{overlap}", *config, f"replay={recorded}", f"weights.overlap={overlap}")
        for overlap in ("true", "false")
    }
    digests = {summary(run)["weights_digest"] for run in (recorded, *runs.values())}
    published = {(run / "published.log").read_text() for run in (recorded, *runs.values())}
    assert len(digests) == len(published) == 1
    for run in runs.values():
        assert all(row["publish/seconds"] > 0 for row in rows(run))
        assert rows(run)[-1]["publish/density"] < 1 and rows(run)[-1]["publish/ratio"] > 1
