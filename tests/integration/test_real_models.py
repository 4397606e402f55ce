"""A run from a Hugging Face folder with a chat template, and the folder that it writes at the end."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_like.models.causal_lm import state_of
from areal_like.tasks.text import TEMPLATE
from tests.folders import write_folder
from tests.integration.runs import rows, summary, train

pytestmark = pytest.mark.integration


def test_a_run_from_a_folder_ends_as_a_folder(tmp_path: Path) -> None:
    """Actors attest the digest of the weights that they sample from; the last folder holds the last version's bits."""
    path = write_folder(tmp_path / "base", "qwen2")
    lines = [json.dumps({"prompt": f"{i} + 1?", "answer": str(i + 1)}) for i in range(40)]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    run = train(
        tmp_path,
        "run",
        "model={name: folder, path: " + path + "}",
        "task={name: jsonl, path: " + str(tmp_path / "sums.jsonl") + ", tokenizer: " + path + ", "
        "system: Add., max_prompt_tokens: 64, max_tokens: 8}",
        "learner.lora={rank: 4}",
        "actors.count=1",
        "run.steps=3",
        "groups_per_batch=4",
        "sizing.group_size=4",
        "eval.prompts=2",
        "rewards.workers=2",
        "rewards.timeout=20",
    )
    assert len(rows(run)) == 3 and summary(run)["version"] == 3
    final = run / "checkpoints" / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    assert state_of(model).digest() == summary(run)["weights_digest"]
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token_id in model.generation_config.eos_token_id
    assert (final / "adapter" / "adapter_config.json").is_file()
