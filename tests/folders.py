"""Tiny random checkpoints as Hugging Face folders, with tokenizer and chat template, as the tests write them."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, Qwen2Config, Qwen3Config

from areal_like.tasks.text import byte_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 264,  # more than the tokenizer knows, as in Qwen
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
}
LONG: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
FEW: dict[str, Any] = {
    name: SHAPE[name] for name in ("initializer_range", *(f"{e}_token_id" for e in ("bos", "eos", "pad")))
}
CONFIGS = {
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),  # biases of query, key and value
    "qwen2 untied": Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),  # norms of queries and keys
    "qwen3 untied": Qwen3Config(**{**SHAPE, "num_key_value_heads": 1}, head_dim=16, tie_word_embeddings=False),
    "qwen3 moe": hf.Qwen3MoeConfig(**SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
    "mistral": hf.MistralConfig(**SHAPE, sliding_window=None),
    "mistral with a window": hf.MistralConfig(**SHAPE, sliding_window=24),
    "gemma": hf.GemmaConfig(**SHAPE, head_dim=8),
    "gemma 3": hf.Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=24),
    "phi 3": hf.Phi3Config(**SHAPE),
    "phi 4 mini": hf.Phi3Config(**SHAPE, rope_parameters=LONG, original_max_position_embeddings=24),
    "smollm 3": hf.SmolLM3Config(**SHAPE),
    "glm 4": hf.Glm4Config(**SHAPE, head_dim=8),
    "glm 4 moe": hf.Glm4MoeConfig(
        **SHAPE, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
    ),
    "gpt 2": hf.GPT2Config(**{**FEW, "vocab_size": 264, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
}
"""Architectures that engine and learner compute alike (`docs/compatibility.md`)."""
REFUSED = {
    "gemma 2": (hf.Gemma2Config(**SHAPE), "final_logit_softcapping"),
    "granite": (hf.GraniteConfig(**SHAPE, logits_scaling=8.0), "logits_scaling"),
    "gpt-oss": (hf.GptOssConfig(**SHAPE), "attention sinks"),
    "qwen3-next": (hf.Qwen3NextConfig(**SHAPE), "linear_attention"),
    "deepseek v3": (hf.DeepseekV3Config(**SHAPE), "kv_lora_rank"),
    "stablelm": (hf.StableLmConfig(**SHAPE), "custom attention"),
}
"""Others, and the cause."""


def write_repository(folder: Path, subset: str, **splits: list[dict[str, str]]) -> str:
    """Write data as a hub has them: splits of a subset, beside another subset without any; returns the path."""
    (folder / subset).mkdir(parents=True)
    lines = ["---", "configs:", f"- config_name: {subset}", "  data_files:"]
    for split, rows in splits.items():
        (folder / subset / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        lines.append(f"  - {{split: {split}, path: {subset}/{split}.jsonl}}")
    (folder / "README.md").write_text(
        "\n".join([*lines, "- {config_name: others, data_files: others/*}", "---"]), encoding="utf-8"
    )
    return str(folder)


def write_folder(folder: Path, kind: str, seed: int = 0) -> str:
    """Write a bfloat16 checkpoint of this kind, as model hubs have them; returns its path."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind]))
    for parameter in model.parameters():  # biases and norms start at 0 and 1: a mix-up would not show
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            buffer.normal_()
    model.generation_config = GenerationConfig(
        eos_token_id=[256, 10], pad_token_id=257, do_sample=True, temperature=0.7
    )
    model.bfloat16().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)
