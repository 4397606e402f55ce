"""Runs with algorithm=sft: the learner alone, its resumes, ranks and adapters; and reinforcement learning behind it."""

import json
from pathlib import Path

import pytest

from tests.integration.runs import rows, summary, train

TINY = ["algorithm=sft", "task={name: arithmetic, digits: 3}", "groups_per_batch=8", "eval.prompts=16"]
SCHEDULED = ["learner.schedule=cosine", "learner.schedule_steps=6", "learner.warmup_steps=1", "eval.every=2"]


def digest(run: Path) -> str:
    return summary(run)["weights_digest"]


@pytest.mark.parametrize("more", [[], ["learner.lora={rank: 2}"]], ids=["whole", "adapters"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, more: list[str]) -> None:
    setting = [*TINY, *SCHEDULED, *more]
    whole = train(tmp_path, "whole", *setting, "run.steps=6")
    parted = train(tmp_path, "parted", *setting, "run.steps=3")
    train(tmp_path, "parted", *setting, "run.steps=6", f"resume={parted}")
    assert digest(parted) == digest(whole)
    for key in ("loss", "lr", "grad_norm", "eval/loss"):
        assert [row.get(key) for row in rows(parted)] == [row.get(key) for row in rows(whole)], key
    found = summary(whole)
    assert [each["version"] for each in found["evaluations"]] == [0, 2, 4, 6]
    assert found["loss_after"] < found["loss_before"] and "reward_after" not in found
    assert (whole / "checkpoints" / "final" / "adapter").exists() is bool(more)


def test_reinforcement_learning_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """With the commands of docs/warm-start.md, but for the first model, which is random here."""
    file = tmp_path / "sums.jsonl"
    sums = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(6) for b in range(6)]
    file.write_text("".join(json.dumps(each) + "\n" for each in sums))
    text = [
        "task.tokenizer=bytes",
        "task.chat_template=false",
        "task.max_tokens=3",
        f"task.path={file}",
        "eval.every=0",
    ]
    model = "model={name: qwen2, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 1, intermediate_size: 16}"
    small = ["groups_per_batch=4", "eval.prompts=2"]
    warm = train(tmp_path, "warm", *text, *small, model, "run.steps=2", config="configs/sft.yaml")
    final = warm / "checkpoints" / "final"
    rl = ["task=jsonl", "task.answer_key=completion", "task.reward=exact", "model=folder", f"model.path={final}"]
    more = ["sizing.group_size=2", "rewards.workers=0", "learner.warmup_steps=0"]
    after = train(tmp_path, "rl", *rl, *text, *small, *more, "run.steps=2", config="configs/base.yaml")
    first = next(line for line in (after / "published.log").read_text().splitlines() if line.startswith("0 "))
    assert first == f"0 {digest(warm)}", "it begins with the weights that were left"
    assert summary(after)["ledger"]["trained"] == 8
