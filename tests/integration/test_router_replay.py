"""Router replay in whole runs: the experts that the engine chose travel through buffer and journal to the learner, also
behind a resume and to several ranks."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from scripts.ledger import audit
from tests.integration.runs import published, rows, train

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
