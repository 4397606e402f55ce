"""Tiny random checkpoints as Hugging Face folders, with tokenizer and chat template, as the tests write them."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

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
CONFIGS = {
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),  # biases of query, key and value
    "qwen2 untied": Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),  # norms of queries and keys
    "qwen3 untied": Qwen3Config(**{**SHAPE, "num_key_value_heads": 1}, head_dim=16, tie_word_embeddings=False),
}


def write_folder(folder: Path, kind: str, seed: int = 0) -> str:
    """Write a bfloat16 checkpoint of this kind, as model hubs have them; returns its path."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind]))
    for parameter in model.parameters():  # biases and norms start at 0 and 1: a mix-up would not show
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    model.generation_config = GenerationConfig(
        eos_token_id=[256, 10], pad_token_id=257, do_sample=True, temperature=0.7
    )
    model.bfloat16().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)
