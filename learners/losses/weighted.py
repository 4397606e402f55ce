"""Losses with the plain policy gradient `w A ∇log π`; they differ in the importance weight w, which has no gradient.
The reported value is `− Σ w A log π ÷ denominator`: only its gradient has a meaning, as with every score function.
`sft` is the same with A = 1."""

import math
from typing import Annotated

import torch
from torch import Tensor

from learners.losses.contract import (
    LOG_RATIO_LIMIT,
    LossBatch,
    Observed,
    current_logprobs,
    log_ratio,
    ratio_to_behaviour,
    score_loss,
    sequence_sums,
    total,
)


def reinforce(batch: LossBatch, denominator: float) -> tuple[Tensor, Observed]:
    """REINFORCE (Williams 1992): w = 1. `loss=is_pg` is this with the correction `exact` (Precup et al. 2000): w = Π
    current/behaviour over the sequence, whose variance grows exponentially with its length. `loss=tis`: the token's
    ratio, truncated (Ionides 2008; in LLM training Yao et al. 2025). `loss=cispo` (MiniMax-M1, arXiv 2506.13585):
    clipped at 1.28, without a lower bound; the paper tunes its upper bound without giving it, and later work uses
    anything up to 7 (ScaleRL, arXiv 2510.13786)."""
    return score_loss(batch.advantages, batch, denominator), {}


def sft(batch: LossBatch, denominator: float) -> tuple[Tensor, Observed]:
    """Cross-entropy, − Σ log π ÷ denominator, without advantages: rejection sampling, where rewards that are None leave
    out all but good samples. With `normalise: token_mean` its value is the mean negative log likelihood per trained
    token, in nats."""
    likely = current_logprobs(batch)
    return total(likely, batch, denominator), {"nll": -likely.detach()}


@ratio_to_behaviour
def vespo(
    batch: LossBatch,
    denominator: float,
    *,
    k: Annotated[float, "[0, inf)"] = 2.0,
    rate: Annotated[float, "(0, inf)"] = 3.0,
    k_negative: Annotated[float, "[0, inf)"] = 3.0,
    rate_negative: Annotated[float, "(0, inf)"] = 2.0,
) -> tuple[Tensor, Observed]:
    """VESPO (arXiv 2602.10693): w = φ(W) with W = Π current/behaviour over the sequence and `φ(W) = W^k e^(λ (1 − W))`,
    which is 1 on-policy. λ is `rate`; tokens with A < 0 have `k_negative` and `rate_negative`. Kernel and numbers as in
    TRL's code; of the paper we saw the abstract. W is kept within 1e-8 and e^20, as there."""
    moved = sequence_sums(log_ratio(batch.current.detach(), batch.behaviour, batch.mask), batch)
    moved = moved.clamp(math.log(1e-8), LOG_RATIO_LIMIT)
    knobs = moved.new_tensor([[k, k_negative], [rate, rate_negative]])
    shape, slope = knobs[:, (batch.advantages < 0).long()]
    weight = (shape * moved + slope * (1.0 - moved.exp())).exp()
    return score_loss(weight * batch.advantages, batch, denominator), {"ratio": moved.exp(), "kernel": weight}


@ratio_to_behaviour
def vtrace(
    batch: LossBatch,
    denominator: float,
    *,
    rho_bar: Annotated[float, "(0, inf]"] = 1.0,
    c_bar: Annotated[float, "(0, inf]"] = 1.0,
) -> tuple[Tensor, Observed]:
    """V-trace actor-critic (IMPALA, arXiv 1802.01561, equation 1 and section 4.2), for a reward at the sequence's end.

    With the baseline as a value that is constant over the sequence and γ = 1, the paper's targets leave the weight `w_s
    = ρ_s · (Π_{s<i<T} c_i) · ρ_T` for s < T and `w_T = ρ_T`, with ρ = min(ratio, ρ̄), c = min(ratio, c̄). This
    reduction is ours; it needs one advantage per sequence, and T is the last trained token.
    """
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
