"""Recorded runs: trained again without actors, bit for bit or with another loss; with a group that must not be trained;
read by `examples/score_losses.py`."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from areal_like.run.samples import read
from examples.score_losses import main as score
from scripts.following.display import replayed
from scripts.ledger import audit
from tests.integration.living import train
from tests.integration.runs import published, rows, summary
from tests.integration.spoiling import BAD_TOKEN

RECORDED = ["actors.count=1", "run.steps=10", "run.target_reward=null", "eval.prompts=8", "scheduler.max_staleness=2"]
RECORDED += ["groups_per_batch=8"]


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
    run = train(tmp_path, "poisoned", *POISONED, *poison)
    dropped = summary(run)["ledger"]["dropped"]["untrainable"]
    assert dropped and dropped % 4 == 0 and not any(audit(run).findings.values())
    kept = [each for each in read(run, ["dropped"]) if each.why.startswith("untrainable: ")]
    assert kept and all(f"token {BAD_TOKEN}" in each.why for each in kept)
    assert all(f"batch {each.step} can't be trained" in each.why for each in kept)
    again = train(tmp_path, "again", *POISONED, f"replay={run}")
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


pytestmark = pytest.mark.integration

SHAPE = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 32, "num_experts_per_tok": 4}
SHAPE |= {"moe_intermediate_size": 16, "norm_topk_prob": True, "initializer_range": 0.2, "tie_word_embeddings": False}
SHAPE |= {"max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SAME = ("loss", "grad_norm", "reward/mean", "tokens", "router/known", "router/replaced", "mismatch_kl")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a run whose engine computes in bfloat16 and whose learner in float32: their routers disagree at times. One
    sequence at a time: nothing is left to when messages arrive."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mixture")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE)).bfloat16().save_pretrained(folder)
    return [
        f"model={{name: folder, path: {folder}}}",
        "learner={router_replay: true, lr: 1e-3, num_minibatches: 1, compute_dtype: float32}",
        "engine={slots: 1, compute_dtype: bfloat16}",
        "mode=sync",
        "task.digits=3",
        "sizing.group_size=4",
        "actors.count=1",
        "groups_per_batch=4",
        "run.target_reward=null",
        "eval.prompts=0",
        "buffer.keep_journal=true",
    ]


def test_experts_come_through_buffer_journal_and_resume(options: list[str], tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", *options, "run.steps=3")
    for row in rows(whole):
        assert row["router/known"] == 1 and row["router/replaced"] < 0.2
    assert rows(whole)[0]["router/replaced"] > 0, "otherwise this shows nothing"
    assert not any(audit(whole).findings.values())

    begun = train(tmp_path, "begun", *options, "run.steps=2")
    train(tmp_path, "begun", *options, "run.steps=3", f"resume={begun}")
    assert published(begun) == published(whole) and len(published(whole)) == 4
    assert [[row.get(name) for name in SAME] for row in rows(begun)] == [
        [row.get(name) for name in SAME] for row in rows(whole)
    ]

    again = train(tmp_path, "again", *options, f"replay={whole}")
    assert published(again) == published(whole), "the journal has the experts"
    own = train(tmp_path, "own", *options, "learner.router_replay=false", f"replay={whole}")
    assert "router/known" not in rows(own)[0] and rows(own)[0]["reward/mean"] == rows(whole)[0]["reward/mean"]
    first = [rows(run)[0]["mismatch_kl"] for run in (whole, own)]
    assert first[0] < first[1] / 2, "of the same tokens, before any step"
