"""Made-up batches and tiny models for the learner's tests."""

from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from areal_like.models.causal_lm import qwen2
from areal_like.types import Batch, Group, Sample
from tests.seeds import shifted

VOCAB = 13


def tiny_model(kind: str = "qwen2", scale: float = 0.3) -> PreTrainedModel:
    """Two layers, four query heads over two key/value heads; weights large enough for peaked distributions."""
    if kind == "qwen2":
        return qwen2(shifted(0), VOCAB, num_attention_heads=4, num_key_value_heads=2, initializer_range=scale).eval()
    llama = kind == "llama"
    config_class, model_class = (LlamaConfig, LlamaForCausalLM) if llama else (Qwen3Config, Qwen3ForCausalLM)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": VOCAB}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": scale}
    config = config_class(**shape, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shifted(0))
        return model_class(config).eval()


def make_sample(
    rng: np.random.Generator, *, prompt: int, response: int, vocab: int = VOCAB, version: int = 0, masked: float = 0.0
) -> Sample:
    """A sample of random tokens and logprobs; one or two versions made the response, `version` is the newest."""
    split = int(rng.integers(0, response)) if version else 0
    runs = [(v, n) for v, n in ((version - 1, split), (version, response - split)) if n]
    mask = rng.random(response) >= masked
    mask[rng.integers(response)] = True
    return Sample(
        tokens=rng.integers(0, vocab, prompt + response).astype(np.int32),
        prompt_length=prompt,
        logprobs=(-rng.exponential(2.0, response)).astype(np.float32),
        loss_mask=mask,
        runs=runs,
        reward=float(rng.integers(0, 5)) / 4,
        finish="stop",
    )


def make_batch(
    rng: np.random.Generator,
    *,
    index: int = 0,
    version: int = 3,
    groups: int = 4,
    size: int = 4,
    vocab: int = VOCAB,
    max_response: int = 8,
    masked: float = 0.2,
) -> Batch:
    """A batch of groups with samples of mixed lengths."""
    made = []
    for g in range(groups):
        prompt = int(rng.integers(1, 7))
        lengths = rng.integers(1, max_response + 1, size)
        samples = [
            make_sample(rng, prompt=prompt, response=int(n), vocab=vocab, version=version - g % 2, masked=masked)
            for n in lengths
        ]
        made.append(
            Group(id=index * groups + g, samples=samples, digests={v: f"d{v}" for s in samples for v, _ in s.runs})
        )
    return Batch(index, version, made)


def assert_metrics_close(found: dict[str, Any], expected: dict[str, Any], rtol: float, atol: float) -> None:
    """Names are the same, numbers are close, all else is equal. The count of computed tokens may differ: which
    sequences share prefixes depends on how they are dealt out."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name == "computed_tokens":
            continue
        if isinstance(value, float):
            np.testing.assert_allclose(found[name], value, rtol, atol, err_msg=name)
        else:
            assert found[name] == value, name
