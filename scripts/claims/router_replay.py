"""Claim: a mixture of experts drifts from its engine because routers choose differently (R3, arXiv 2510.11370).

`python -m scripts.claims.router_replay [--quick] [--out FOLDER]`

A random Qwen3-MoE (4 layers, 16 experts, 4 per token) samples 8 groups of 4 answers of 64 tokens in the embedded
engine, in bfloat16 on the CPU. A learner with the same weights scores them, in float32 or under bfloat16 autocast, with
its own routers or with the experts that the engine chose (`learner.router_replay`). `mismatch_kl` is the mean k3 of the
two distributions' logprobs, `replaced` the share of router decisions that replay changes. No weights move.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from .studies import argument_parser

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    OPTIONS = argument_parser(__doc__, "router_replay").parse_args()

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from actors.engines.torch_engine import TorchEngine
from areal_like.models.causal_lm import publishable
from areal_like.types import Batch, Completion, Group, Limits, Sample
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo

from ..analysis.intervals import bootstrap, markdown_table
from ..console.output import write_json
from .studies import prepare, tell

SEEDS, GROUPS, GROUP_SIZE, PROMPT, RESPONSE, VOCABULARY = 10, 8, 4, 12, 64, 256
FIGURES = {"mismatch_kl": "mismatch_kl", "mismatch_max": "mismatch_max", "router/replaced": "replaced"}


def mixture(seed: int) -> PreTrainedModel:
    """The model, its weights rounded to the published bits: the same for the same seed."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        initializer_range=0.1,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    publishable(model)
    return model


async def sampled(seed: int) -> Batch:
    """Answers of the engine in bfloat16, with the experts that it chose."""
    engine = TorchEngine(mixture(seed), compute_dtype="bfloat16", return_experts=True)
    rng, groups = np.random.default_rng(seed), []
    for place in range(GROUPS):
        prompt = rng.integers(0, VOCABULARY, PROMPT).astype(np.int32)
        keys = (seed << 16 | place << 8 | index for index in range(GROUP_SIZE))
        done = await asyncio.gather(*(engine.generate(prompt, Limits(RESPONSE, key=key)) for key in keys))
        groups.append(Group(place, [_sample(prompt, each, float(index % 2)) for index, each in enumerate(done)]))
    await engine.close()
    return Batch(0, 0, groups)


def _sample(prompt: np.ndarray, done: Completion, reward: float) -> Sample:
    tokens, mask = np.concatenate([prompt, done.tokens]), np.ones(len(done.tokens), bool)
    return Sample(tokens, PROMPT, done.logprobs, mask, done.runs, reward, done.finish, [], done.experts)


def scored(seed: int, batch: Batch, compute: str, replay: bool) -> dict[str, float | None]:
    """Metrics of a step of rate 0; None if the step has none of a name."""
    knobs: dict[str, Any] = {"lr": 0.0, "num_minibatches": 1, "compute_dtype": compute, "router_replay": replay}
    learner = TorchLearner(mixture(seed), decoupled_ppo, partial(group), **knobs)
    metrics = learner.train(batch)
    return {label: metrics.get(name) for name, label in FIGURES.items()}


def main() -> None:
    prepare()
    seeds = range(2 if OPTIONS.quick else SEEDS)
    found: dict[str, list[dict[str, float | None]]] = {}
    for seed in seeds:
        batch = asyncio.run(sampled(seed))
        for compute in ("float32", "bfloat16"):
            for replay in (False, True):
                name = f"{compute}, {'replay' if replay else 'own routers'}"
                found.setdefault(name, []).append(scored(seed, batch, compute, replay))
        print(f"seed {seed + 1} of {len(seeds)}", flush=True)
    rows = [
        [name, *(bootstrap(row[label] for row in runs) for label in FIGURES.values())] for name, runs in found.items()
    ]
    tell(OPTIONS.out, markdown_table(["learner", *FIGURES.values()], rows))
    write_json(OPTIONS.out / "router_replay.json", found)


if __name__ == "__main__":
    main()
