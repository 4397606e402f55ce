"""Adapters learn: a model half-trained to copy two digits is frozen, and improves through LoRA."""

from functools import partial

import numpy as np
import torch

from areal_like.models.causal_lm import qwen2, write_state
from areal_like.types import Batch, Group, Sample
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo
from tests.seeds import seeded

torch.set_num_threads(1)
VOCAB, SEPARATOR, DIGITS = 13, 10, 2


def prompts(rng: np.random.Generator, count: int) -> torch.Tensor:
    digits = rng.integers(0, 10, (count, DIGITS))
    return torch.from_numpy(np.append(digits, np.full((count, 1), SEPARATOR), axis=1))


def half_trained(seed: int = 0, until: float = 0.5):
    """Train by cross-entropy until half of the probability is on the right digits."""
    model, rng = qwen2(seed, VOCAB, num_attention_heads=4, initializer_range=0.1), seeded(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(2000):
        asked = prompts(rng, 64)
        whole = torch.cat([asked, asked[:, :DIGITS]], dim=1)
        logits = model(whole).logits[:, DIGITS:-1]
        right = logits.log_softmax(-1).gather(-1, asked[:, :DIGITS, None])
        if right.exp().mean() > until:
            break
        optimizer.zero_grad()
        (-right.mean()).backward()
        optimizer.step()
    return model.requires_grad_(True)


@torch.no_grad()
def rollouts(model, rng: np.random.Generator, index: int, groups: int = 16, size: int = 8) -> Batch:
    asked = prompts(rng, groups).repeat_interleave(size, 0)
    tokens, logprobs = asked, []
    for _ in range(DIGITS):
        rows = model(tokens).logits[:, -1].log_softmax(-1)
        drawn = torch.from_numpy(
            np.array([rng.choice(VOCAB, p=row / row.sum()) for row in rows.double().exp().numpy()])
        )
        logprobs.append(rows.gather(-1, drawn[:, None]))
        tokens = torch.cat([tokens, drawn[:, None]], dim=1)
    right = (tokens[:, -DIGITS:] == asked[:, :DIGITS]).float().mean(1)
    made = zip(tokens.numpy().astype(np.int32), torch.cat(logprobs, 1).numpy(), right.tolist(), strict=True)
    mask, runs = np.ones(DIGITS, bool), [(index, DIGITS)]
    samples = [Sample(t, DIGITS + 1, p, mask, runs, reward, "stop") for t, p, reward in made]
    return Batch(index, index, [Group(g, samples[g * size : (g + 1) * size]) for g in range(groups)])


def test_reward_rises_with_adapters_alone():
    base = half_trained()
    served = qwen2(0, VOCAB, num_attention_heads=4)
    learner = TorchLearner(base, decoupled_ppo, partial(group), lr=1e-2, lora={"rank": 8, "alpha": 16.0})
    rng, rewards, ratios = seeded(1), [], []
    for index in range(120):
        write_state(learner.snapshot(), dict(served.named_parameters()))  # as actors do
        batch = rollouts(served, rng, index)
        ratios.append(learner.train(batch)["kl/k3"])
        rewards.append(np.mean([sample.reward for sample in batch.samples]))
    begin, best = np.mean(rewards[:3]), np.mean(np.reshape(rewards, (-1, 20)), axis=1).max()
    assert begin < 0.6, "half of the digits were right by cross entropy, and 768 are drawn"
    assert best > begin + 0.06, f"{begin:.3f} to {best:.3f}: three deviations of what a frozen model would draw"
    assert max(ratios) < 1e-3  # the merged, rounded weights and the learner's adapters are one policy but for rounding
