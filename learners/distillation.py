"""The reverse KL to a teacher over its most likely tokens, and weights for old samples. Pure.

KL(student ‖ teacher) on the student's own prefixes is what on-policy distillation lowers (GKD, arXiv 2306.13649;
"On-Policy Distillation", Thinking Machines, 2025). `learners.advantages.distill` estimates it from the sampled token
alone; here it is summed over k tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learners.losses.contract import log_ratio

TINY = 1e-12
"""Least probability of all other tokens together."""


def lumped_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student ‖ teacher) [N] of distributions over k tokens and "any other" token, from logprobs [N, k] of the same
    tokens. It is never above the KL over all tokens, grows with k, and equals that KL if k is the whole vocabulary."""
    kl = (student.exp() * (student - teacher)).sum(-1)
    ours, theirs = (1.0 - each.exp().sum(-1) for each in (student, teacher))
    rest = ours.clamp(min=TINY) * (ours.clamp(min=TINY).log() - theirs.clamp(min=TINY).log())
    return kl + torch.where((ours > TINY) | (theirs > TINY), rest, 0.0)


def prefix_weights(current: Tensor, behaviour: Tensor, sequence: Tensor, cap: float) -> Tensor:
    """Π min(π/π_b, `cap`) over the trained tokens before each token of its sequence: [N], without gradient. The
    teacher's word counts less after a prefix that the student would no longer produce. (The token itself needs no
    weight: the KL is a sum over all tokens.)"""
    moved = log_ratio(current.detach(), behaviour, torch.ones_like(current, dtype=torch.bool)).double()
    moved = moved.clamp(max=float(torch.tensor(cap, dtype=torch.float64).log()))
    before = moved.cumsum(0) - moved
    starts = torch.ones_like(sequence, dtype=torch.bool)
    starts[1:] = sequence[1:] != sequence[:-1]
    places = torch.arange(len(sequence), device=sequence.device)
    first = torch.where(starts, places, 0).cummax(0).values if len(sequence) else places
    return (before - before[first]).exp().to(current.dtype)
