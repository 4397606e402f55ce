"""Model FLOPs utilisation of the train step: `python -m scripts.bench.mfu [--device cpu --tiny] [--json FILE]`.

A Qwen2.5-0.5B architecture from random initial weights, PPO-clip on a batch whose lengths are log-normal (p95/p50 = 4),
bf16 matrices on a GPU, one optimizer step per batch. FLOPs are those of the model alone (PaLM, arXiv 2204.02311,
appendix B): 6 per weight that multiplies and per token, forward and backward, the head only where a token is trained,
and attention's 6 · layers · width · length² per sequence (causal: half of the scores). Recomputation for activation
checkpointing does not count. MFU is over the peak of the device, by its name or `--peak`.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from time import perf_counter

from .figures import bench_parser

if __name__ == "__main__":  # first of all, for `--help` needs nothing of what follows
    parser = bench_parser("mfu", "model FLOPs utilisation of the train step")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model and a batch for a look on a CPU")
    parser.add_argument("--peak", type=float, help="FLOP/s of the device")
    parser.add_argument("--steps", type=int, default=5, help="train steps that count, of which the median")
    parser.add_argument("--groups", type=int, default=8, help="of 8 sequences each")
    parser.add_argument("--max-tokens", type=int, default=16_384, help="per micro-batch")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    ARGUMENTS = parser.parse_args()

import numpy as np
import torch
from transformers import PreTrainedModel

from areal_like.models import qwen2
from areal_like.types import Batch, Group, Sample
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import ppo

from .figures import tell

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12}
"""Dense bf16 FLOP/s from the makers' data sheets; the first name found in the device's own name counts."""
PROMPT, MEDIAN, SIGMA = 64, 512, float(np.log(4) / 1.645)
SIZES = {
    "0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "max_position_embeddings": 32_768,
    },
    "tiny": {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 512},
}


def made_batch(vocab: int, groups: int, size: int, longest: int) -> Batch:
    """Random tokens; log-normal lengths; rewards of 0 and 1."""
    rng = np.random.default_rng(0)
    lengths = np.clip(MEDIAN * np.exp(SIGMA * rng.standard_normal((groups, size))), 1, longest).astype(int)
    return Batch(
        0,
        0,
        [Group(id=g, samples=[_sample(rng, vocab, n, i) for i, n in enumerate(lengths[g])]) for g in range(groups)],
    )


def _sample(rng: np.random.Generator, vocab: int, length: int, index: int) -> Sample:
    return Sample(
        tokens=rng.integers(0, vocab, PROMPT + length).astype(np.int32),
        prompt_length=PROMPT,
        logprobs=np.full(length, -np.log(vocab), np.float32),
        loss_mask=np.ones(length, bool),
        runs=[(0, int(length))],
        reward=float(index % 2),
        finish="stop",
    )


def flops(model: PreTrainedModel, batch: Batch) -> float:
    """Of forward and backward of one train step."""
    config, head = model.config, model.get_output_embeddings().weight
    embedding = {id(model.get_input_embeddings().weight), id(head)}
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in embedding)
    samples = [sample for each in batch.groups for sample in each.samples]
    lengths = np.array([len(sample.tokens) for sample in samples], np.float64)
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    attention = 6 * config.num_hidden_layers * config.hidden_size * float((lengths**2).sum())
    return 6.0 * weights * float(lengths.sum()) + 6.0 * head.numel() * trained + attention


def peak_of(device: str) -> float:
    """FLOP/s. Raises SystemExit for a device that is not known."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    found = next((peak for part, peak in PEAKS.items() if part in name), None)
    return found or sys.exit(f"error: the peak of {name} is not known here: give its dense bf16 FLOP/s by --peak")


def main(args: argparse.Namespace) -> None:
    peak = args.peak or peak_of(args.device)
    model = qwen2(0, **SIZES["tiny" if args.tiny else "0.5b"])  # type: ignore[arg-type]
    batch = made_batch(model.config.vocab_size, args.groups, 8, 256 if args.tiny else 4096)
    gpu = args.device == "cuda"
    learner = TorchLearner(
        model,
        ppo,
        group,
        lr=1e-6,
        num_minibatches=1,
        max_tokens=args.max_tokens,
        device=args.device,
        compute_dtype="bfloat16" if gpu else "float32",
        checkpoint_activations=not args.no_checkpointing,
    )
    seconds = []
    for _ in range(args.steps + 1):
        begin = perf_counter()
        learner.train(batch)
        if gpu:
            torch.cuda.synchronize()
        seconds.append(perf_counter() - begin)
    took, work = median(seconds[1:]), flops(model, batch)
    tokens = sum(len(sample.tokens) for each in batch.groups for sample in each.samples)
    metrics = {"tokens": tokens, "step_seconds": took, "tokens_per_second": tokens / took, "step_flops": work}
    metrics |= {"flops_per_second": work / took, "mfu": work / took / peak}
    if gpu:
        metrics["peak_bytes"] = float(torch.cuda.max_memory_allocated())
    tell(metrics, args.json)


if __name__ == "__main__":
    main(ARGUMENTS)
