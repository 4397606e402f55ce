"""Bytes per version along a real AdamW trajectory, against whole weights and the entropy bound.

    python -m scripts.bench.trajectory [--json FILE] [--steps 8] [--lr 1e-6 1e-5]

A Qwen2-architecture model of 31 M parameters from random weights, with the learner's own optimizer (`MasterAdamW`, fp32
master weights, bfloat16 published) and real gradients of the cross entropy of synthetic text: sequences of a Markov
chain. Each step is a version. Printed per learning rate: `ratio` (whole weights ÷ delta), `bound_ratio` (÷ the entropy
of positions and steps, `scripts.bench.entropy`; the bound leaves out vectors and heads, which the delta includes),
`density` of changed elements; for the first step, the last, and all.
"""

from __future__ import annotations

import argparse
from typing import Any

from .figures import bench_parser

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    parser = bench_parser("trajectory", "bytes per version of a real AdamW trajectory")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    ARGUMENTS = parser.parse_args()

import numpy as np
import torch
import torch.nn.functional as F

from areal_like.models.causal_lm import qwen2, state_of
from areal_like.weights.codec import Encoder
from areal_like.weights.delta import DeltaHead, write
from areal_like.weights.layout import Layout
from areal_like.weights.planes import pack
from areal_like.weights.state import State
from learners.collectives import Ranks
from learners.optim import MasterAdamW
from learners.schedules import Schedule

from .entropy import bound_bytes
from .figures import tell

VOCAB, SEQUENCES, LENGTH = 8192, 4, 96
KNOBS: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 1536,
}
ADAMW: dict[str, Any] = {
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "clip_grad": 1.0,
}
BLOCK_BYTES = 16 << 20
NO_DIGEST = "0" * 32


def text(rng: np.random.Generator, successors: np.ndarray) -> torch.Tensor:
    """Tokens int64 [SEQUENCES, LENGTH] of the chain in which each token has a few successors [VOCAB, n]."""
    tokens = np.empty((SEQUENCES, LENGTH), np.int64)
    tokens[:, 0] = rng.integers(0, VOCAB, SEQUENCES)
    for at in range(1, LENGTH):
        tokens[:, at] = successors[tokens[:, at - 1], rng.integers(0, successors.shape[1], SEQUENCES)]
    return torch.from_numpy(tokens)


def delta_bytes(before: State, after: State) -> int:
    layout = Layout(before.specs, BLOCK_BYTES)
    encoder = Encoder(layout)
    blocks = [pack(encoder.encode(block, before.buffer, after.buffer)) for block in layout.blocks]
    return len(write(DeltaHead(0, 1, NO_DIGEST, NO_DIGEST), layout, blocks))


def density(before: State, after: State) -> float:
    pairs = zip(before.tensors(), after.tensors(), strict=True)
    return sum(int(np.count_nonzero(old != new)) for (_, old), (_, new) in pairs) * 2 / before.nbytes


def trajectory(lr: float, steps: int) -> list[dict[str, float]]:
    rng = np.random.default_rng(0)
    successors = rng.integers(0, VOCAB, (VOCAB, 4))
    model = qwen2(0, VOCAB, **KNOBS)
    optimizer = MasterAdamW(model, schedule=Schedule(lr), publish_dtype=torch.bfloat16, ranks=Ranks(1), **ADAMW)
    before, found = state_of(model), []
    for _ in range(steps):
        tokens = text(rng, successors)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        after = state_of(model)
        nbytes, bound = delta_bytes(before, after), bound_bytes(before, after)
        found.append(
            {
                "bytes": nbytes,
                "ratio": after.nbytes / nbytes,
                "bound_ratio": after.nbytes / bound,
                "density": density(before, after),
            }
        )
        before = after
    return found


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    metrics: dict[str, float] = {}
    for lr in args.lr:
        rows = trajectory(lr, args.steps)
        for name, row in (("first", rows[0]), ("last", rows[-1])):
            metrics |= {f"lr{lr:g}_{name}_{key}": value for key, value in row.items()}
        for key in ("ratio", "bound_ratio"):  # of all bytes, so the harmonic mean
            metrics[f"lr{lr:g}_all_{key}"] = len(rows) / sum(1 / row[key] for row in rows)
    tell(metrics, args.json)


if __name__ == "__main__":
    main(ARGUMENTS)
