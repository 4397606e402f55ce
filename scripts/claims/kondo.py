"""Claim: the backward passes of 3 % of the samples are enough (the Kondo gate, arXiv 2603.20526).

`python -m scripts.claims.kondo [--quick] [--out FOLDER]`

Savings: the learner's train step on the same batch with `dg` and `dg_kondo` (keep 3 %), 16 prompts × 8 answers of a
given length after a prompt of 16 tokens, for a Qwen2 of width 128 with 4 layers in one minibatch; the two take turns,
medians. A kept token costs its whole sequence up to itself. `scripts.claims.digits` compares their learning.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from .studies import argument_parser, prepare, write

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    OPTIONS = argument_parser(__doc__, "kondo").parse_args()

import numpy as np

from areal_like.models.causal_lm import qwen2
from areal_like.types import Batch, Group, Sample
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.delightful import dg, dg_kondo

from ..analysis.intervals import markdown_table

LENGTHS = (1, 8, 32, 128)
LOSSES: dict[str, Callable[..., Any]] = {"dg": dg, "dg_kondo": partial(dg_kondo, keep=0.03)}
VOCABULARY = 64


def batch_of(length: int, prompts: int, seed: int) -> Batch:
    """Random tokens and rewards 0 or 1, as at the start of a training."""
    rng = np.random.default_rng(seed)

    def sample() -> Sample:
        return Sample(
            tokens=rng.integers(0, VOCABULARY, 16 + length).astype(np.int32),
            prompt_length=16,
            logprobs=np.full(length, -np.log(VOCABULARY), np.float32),
            loss_mask=np.ones(length, bool),
            runs=[(0, length)],
            reward=float(rng.integers(0, 2)),
            finish="stop",
        )

    return Batch(0, 0, [Group(id=number, samples=[sample() for _ in range(8)]) for number in range(prompts)])


def step_times(length: int, prompts: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Loss → median seconds of a train step, share of the input tokens that went through the backward pass."""
    learners = {
        name: TorchLearner(
            qwen2(0, VOCABULARY, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256),
            loss, partial(group), lr=1e-5, num_minibatches=1,
        )
        for name, loss in LOSSES.items()
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in LOSSES}
    shares: dict[str, list[float]] = {name: [] for name in LOSSES}
    for repeat in range(repeats + 1):
        batch = batch_of(length, prompts, repeat)
        for name, learner in learners.items():
            began = time.perf_counter()
            metrics = learner.train(batch)
            if repeat:  # the first one warms up
                seconds[name].append(time.perf_counter() - began)
                shares[name].append(metrics["backward_share"])
    return {name: (median(seconds[name]), median(shares[name])) for name in LOSSES}


def main(options: argparse.Namespace) -> None:
    prepare()
    rows: list[list[Any]] = []
    for length in (1, 8) if options.quick else LENGTHS:
        times = step_times(length, *((2, 2) if options.quick else (16, 9)))
        (full, everything), (gated, share) = times["dg"], times["dg_kondo"]
        rows.append([length, 1e3 * full, 1e3 * gated, full / gated, share / everything])
    header = ["tokens per answer", "dg, ms per step", "dg_kondo, ms per step", "speed-up", "backward share"]
    write(options.out, rows, markdown_table(header, rows))


if __name__ == "__main__":
    main(OPTIONS)
