"""Models, batches and speeds of machines that the items of `scripts.bench.gpu` share. Part of that command.

FLOPs are those of the model alone (PaLM, arXiv 2204.02311, appendix B): 6 per weight that multiplies and per token,
forward and backward, the head only where a token is trained, and attention's 6 · layers · width · length² per sequence
(causal: half of the scores). Recomputation for activation checkpointing does not count.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from areal_like.models.causal_lm import qwen2
from areal_like.types import Batch, Group, Sample

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12}
"""Dense bf16 FLOP/s from the makers' data sheets; the first name found in the device's own name counts."""
PROMPT, MEDIAN, SIGMA = 64, 512, float(np.log(4) / 1.645)
SIZES: dict[str, dict[str, int | bool]] = {
    "0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "max_position_embeddings": 32_768,
    },
    "1.5b": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "max_position_embeddings": 32_768,
    },
    "7b": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18_944,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
    },
}
"""Architectures of Qwen2.5 models."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item runs: device, whether with shapes for a CPU, and a folder for what it writes."""

    device: str
    tiny: bool
    folder: Path

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"

    def wait(self) -> None:
        """Until the device is done."""
        if self.gpu:
            torch.cuda.synchronize()


def new_model(place: Place, size: str, seed: int = 0, **other: int | bool | float) -> PreTrainedModel:
    """Random weights, made on the device: a CPU would take minutes."""
    knobs = SIZES["tiny" if place.tiny else size] | other
    with torch.device(place.device):
        return qwen2(seed, **knobs).eval()  # type: ignore[arg-type]


def small_model(place: Place, device: str | None = None, **other: int | bool | float) -> PreTrainedModel:
    """For checks: the same bits on every device, large enough for every kernel; weights that are sure of themselves."""
    knobs = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}
    knobs |= {"hidden_size": 64, "intermediate_size": 128} if place.tiny else {}
    shape = {"vocab_size": 600 if place.tiny else 5000, "initializer_range": 0.1, "num_hidden_layers": 2}
    return qwen2(0, **(knobs | shape | other)).eval().to(device or place.device)  # type: ignore[arg-type]


def made_batch(vocab: int, groups: int, size: int, longest: int, index: int = 0) -> Batch:
    """Random tokens, one prompt per group; log-normal lengths (p95/p50 = 4); rewards of 0 and 1; logprobs near those of
    a model that knows nothing."""
    rng = np.random.default_rng(index)
    lengths = np.clip(MEDIAN * np.exp(SIGMA * rng.standard_normal((groups, size))), 1, longest).astype(int)
    prompts = rng.integers(0, vocab, (groups, PROMPT)).astype(np.int32)
    made = [[_sample(rng, vocab, prompts[g], int(n), i) for i, n in enumerate(lengths[g])] for g in range(groups)]
    return Batch(index, 0, [Group(id=index * groups + g, samples=samples) for g, samples in enumerate(made)])


def _sample(rng: np.random.Generator, vocab: int, prompt: np.ndarray, length: int, index: int) -> Sample:
    return Sample(
        tokens=np.concatenate([prompt, rng.integers(0, vocab, length).astype(np.int32)]),
        prompt_length=len(prompt),
        logprobs=(rng.normal(0, 0.1, length) - np.log(vocab)).astype(np.float32),
        loss_mask=np.ones(length, bool),
        runs=[(0, length)],
        reward=float(index % 2),
        finish="stop",
    )


def flops(model: PreTrainedModel, batch: Batch) -> float:
    """Of forward and backward of one train step, each sample by itself."""
    config, head = model.config, model.get_output_embeddings().weight
    embedding = {id(model.get_input_embeddings().weight), id(head)}
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in embedding)
    lengths = np.array([len(sample.tokens) for sample in batch.samples], np.float64)
    trained = sum(int(sample.loss_mask.sum()) for sample in batch.samples)
    attention = 6 * config.num_hidden_layers * config.hidden_size * float((lengths**2).sum())
    return 6.0 * weights * float(lengths.sum()) + 6.0 * head.numel() * trained + attention


def peak(place: Place) -> float | None:
    """Dense bf16 FLOP/s; None for a device that is not known."""
    name = torch.cuda.get_device_name() if place.gpu else "cpu"
    return next((speed for part, speed in PEAKS.items() if part in name), None)


def bandwidth(place: Place) -> float:
    """Bytes per second, read and written, of a copy within the device's memory."""
    source = torch.zeros(1 << 25 if place.tiny else 1 << 31, dtype=torch.uint8, device=place.device)
    target = torch.zeros_like(source)
    return 2 * source.numel() / fastest(place, lambda: target.copy_(source))


def to_device(place: Place) -> float:
    """Bytes per second of a copy from pinned memory of the host."""
    source = torch.zeros(1 << 22 if place.tiny else 1 << 28, dtype=torch.uint8, pin_memory=place.gpu)
    target = torch.zeros_like(source, device=place.device)
    return source.numel() / fastest(place, lambda: target.copy_(source, non_blocking=True))


def fastest(place: Place, call: object, repeats: int = 5) -> float:
    """Seconds of the fastest of several calls, one more to warm up."""
    assert callable(call)
    best = float("inf")
    for repeat in range(repeats + 1):
        place.wait()
        begin = time.perf_counter()
        call()
        place.wait()
        if repeat:
            best = min(best, time.perf_counter() - begin)
    return best
