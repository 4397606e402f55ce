"""The copy-4 bench starts TRL from the same model and data as our run."""

import json

import torch
from transformers import AutoModelForCausalLM

from areal_like.config import run_config as configs
from areal_like.config.registry import build
from areal_like.tasks.copying import Copy
from scripts.bench import copying as bench


def test_the_tokenizer_is_the_tasks():
    task, tokenizer = Copy(0, digits=bench.DIGITS), bench.characters()
    prompt = task.prompt("train", 3)
    text = task.codec.decode(prompt.tokens)
    assert tokenizer(text)["input_ids"] == prompt.tokens.tolist()
    assert tokenizer.decode(prompt.answer) == " ".join(text[: bench.DIGITS])
    assert tokenizer.eos_token_id >= task.vocab_size  # the model never says it, so no answer ends early


def test_model_and_prompts_are_those_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "STEPS", 2)
    bench.prepare(7, tmp_path / "seed-7")
    config, task = configs.load(["configs/copy4.yaml"]), Copy(7, digits=bench.DIGITS)
    assert (config.groups_per_batch, config.sizing["group_size"]) == (bench.BATCH, bench.SIZE)
    ours = build("model", config.model, 7, task.vocab_size)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "seed-7", dtype=torch.float32)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    rows = json.loads((tmp_path / "seed-7" / "prompts.json").read_text())
    assert len(rows) == 2 * bench.BATCH
    assert rows[5]["answer"] == task.prompt("train", 5).answer.tolist()
