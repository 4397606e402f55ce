"""Losses with the plain policy gradient `w A ∇log π`; they differ in the importance weight w, which has no gradient.

The reported value is `− Σ w A log π ÷ denominator`: only its gradient has a meaning, as with every score function.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from learners.losses.contract import (
    LOG_RATIO_LIMIT,
    LossBatch,
    Observed,
    log_ratio,
    ratio,
    score_loss,
    sequence_sums,
)


def reinforce(batch: LossBatch, denominator: float) -> tuple[Tensor, Observed]:
    """REINFORCE (Williams 1992): w = 1. No correction: the control for every off-policy loss."""
    return score_loss(batch.advantages, batch, denominator), {}


def is_pg(
    batch: LossBatch, denominator: float, *, level: Literal["sequence", "token"] = "sequence"
) -> tuple[Tensor, Observed]:
    """Policy gradient with importance weights that are neither clipped nor truncated (Precup et al. 2000).

    "sequence": w = Π current/behaviour over the whole sequence, which is exact for a reward at its end, and whose
    variance grows exponentially with its length. "token": w = the token's own ratio, the first-order approximation that
    most LLM losses start from. They agree on sequences of one token. Weights are bounded by e^±20 to stay finite.
    """
    if level not in ("sequence", "token"):
        raise ValueError(f"level must be 'sequence' or 'token', got {level!r}")
    moved = log_ratio(batch.current.detach(), batch.behaviour, batch.mask)
    if level == "sequence":
        moved = sequence_sums(moved, batch).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    weight = moved.exp()
    return score_loss(weight * batch.advantages, batch, denominator), {"ratio": weight}


def tis(batch: LossBatch, denominator: float, *, cap: Annotated[float, "(0, inf]"] = 2.0) -> tuple[Tensor, Observed]:
    """Truncated importance sampling (Ionides 2008; in LLM training Yao et al. 2025): w = min(current/behaviour, cap).

    The blog post's version with a clipped ratio to a proximal policy is `decoupled_ppo` with `cap_mode: clamp` and
    `behaviour_cap: 2`; this is the policy gradient without a second clip.
    """
    if cap <= 0.0:
        raise ValueError(f"cap must be positive, got {cap}")
    moved = ratio(batch.current.detach(), batch.behaviour, batch.mask)
    observed = {"ratio": moved, "capped_share": moved > cap}
    return score_loss(moved.clamp(max=cap) * batch.advantages, batch, denominator), observed


def cispo(
    batch: LossBatch,
    denominator: float,
    *,
    clip: Annotated[float, "[0, 1]"] | None = None,
    clip_high: Annotated[float, "[0, inf]"] = 0.28,
) -> tuple[Tensor, Observed]:
    """CISPO (MiniMax-M1, arXiv 2506.13585): w = clip(current/behaviour, 1 − clip, 1 + clip_high).

    Unlike PPO's clip, it clips the weight and keeps every token's gradient. As in the paper there is no lower bound by
    default (`clip: null`); the paper tunes the upper one without giving it, and later work uses anything up to 7
    (ScaleRL, arXiv 2510.13786).
    """
    if clip is not None and not 0.0 <= clip <= 1.0:
        raise ValueError(f"clip must lie in [0, 1], got {clip}")
    if clip_high < 0.0:
        raise ValueError(f"clip_high must not be negative, got {clip_high}")
    moved = ratio(batch.current.detach(), batch.behaviour, batch.mask)
    weight = moved.clamp(0.0 if clip is None else 1.0 - clip, 1.0 + clip_high)
    observed = {"ratio": moved, "clip_share": weight != moved}
    return score_loss(weight * batch.advantages, batch, denominator), observed


def vtrace(
    batch: LossBatch,
    denominator: float,
    *,
    rho_bar: Annotated[float, "(0, inf]"] = 1.0,
    c_bar: Annotated[float, "(0, inf]"] = 1.0,
) -> tuple[Tensor, Observed]:
    """V-trace actor-critic (IMPALA, arXiv 1802.01561, equation 1 and section 4.2), for a reward at the sequence's end.

    With the baseline as a value that is constant over the sequence and γ = 1, the temporal differences before the last
    token T vanish, and the paper's targets leave the weight `w_s = ρ_s · (Π_{s<i<T} c_i) · ρ_T` for s < T and
    `w_T = ρ_T`, with ρ = min(ratio, ρ̄), c = min(ratio, c̄): each token's weight depends on how likely its whole future
    still is. This reduction is ours (no LLM trainer has V-trace); it needs one advantage per sequence, and T is the
    last trained token.
    """
    if rho_bar <= 0.0 or c_bar <= 0.0:
        raise ValueError(f"rho_bar and c_bar must be positive, got {rho_bar} and {c_bar}")
    moved = log_ratio(batch.current.detach(), batch.behaviour, batch.mask).double()
    log_rho = moved.clamp(max=math.log(rho_bar))
    log_c = torch.where(batch.mask, moved.clamp(max=math.log(c_bar)), 0.0)
    so_far = log_c.cumsum(0)
    last = _last_trained(batch)
    future = (so_far - log_c)[last] - so_far  # log Π of c over s < i < T
    log_weight = torch.where(torch.arange(len(last), device=last.device) == last, 0.0, log_rho + future) + log_rho[last]
    weight = log_weight.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().to(batch.advantages.dtype)
    observed = {"ratio": moved.exp().to(weight.dtype), "trace_weight": weight, "clip_share": moved > log_rho}
    return score_loss(weight * batch.advantages, batch, denominator), observed


def _last_trained(batch: LossBatch) -> Tensor:
    """For each token the place of its sequence's last trained token: int64 [N] (0 for sequences without one)."""
    places = torch.arange(len(batch.mask), device=batch.mask.device)
    last = places.new_zeros(batch.most_sequences)
    last = last.scatter_reduce(0, batch.sequence, torch.where(batch.mask, places, 0), "amax")
    return last[batch.sequence]
