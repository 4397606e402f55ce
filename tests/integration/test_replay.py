"""Recorded runs: trained again without actors, bit for bit or with another loss; with a group that must not be trained;
read by `examples/score_losses.py`."""

from pathlib import Path

import pytest
import torch

from areal_like.run.samples import read
from examples.score_losses import main as score
from scripts.following.display import replayed
from scripts.ledger import audit
from tests.integration.living import train_in_processes
from tests.integration.runs import rows, summary, train
from tests.integration.spoiling import BAD_TOKEN

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


POISONED = ["groups_per_batch=4", "run.target_reward=null", "eval.prompts=4", "eval.every=0", "run.trackers=[]"]
POISONED += ["buffer.keep_journal=true", "learner.ranks=2", "run.steps=8"]


@pytest.mark.integration
def test_a_poisoned_batch_is_set_aside_by_all_ranks_and_a_replay_has_the_weights_of_the_run(tmp_path: Path) -> None:
    poison = ["filter=tests.integration.spoiling:blind", "workflow=tests.integration.spoiling:poisoning"]
    run = train_in_processes(tmp_path, "poisoned", *POISONED, *poison)
    dropped = summary(run)["ledger"]["dropped"]["untrainable"]
    assert dropped and dropped % 4 == 0 and not any(audit(run).findings.values())
    kept = [each for each in read(run, ["dropped"]) if each.why.startswith("untrainable: ")]
    assert kept and all(f"token {BAD_TOKEN}" in each.why for each in kept)
    assert all(f"batch {each.step} can't be trained" in each.why for each in kept)
    again = train_in_processes(tmp_path, "again", *POISONED, f"replay={run}")
    assert summary(again)["weights_digest"] == summary(run)["weights_digest"]


SMALL = ["run.steps=2", "run.target_reward=null", "eval.prompts=4", "eval.every=0", "buffer.keep_journal=true"]


@pytest.mark.integration
def test_losses_on_a_recorded_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, "run", *SMALL, "actors.count=1", "groups_per_batch=6", "sizing.group_size=4")
    found = score([str(run), "--loss", "reinforce", "--loss", "tis", "--loss", "dg"])
    assert list(found) == ["reinforce", "tis", "dg"] and found["dg"].shape[0] == 2
    fresh = torch.cosine_similarity(found["reinforce"][0], found["tis"][0], dim=0)
    assert fresh > 0.99, "the first batch comes from the learner's own weights"
    assert not torch.equal(found["reinforce"][1], found["dg"][1]) and "cosines" in capsys.readouterr().out
