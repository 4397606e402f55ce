"""Losses that bound a probability ratio otherwise than PPO: clipped for a whole sequence (GSPO), softly (SAPO), or by
leaving tokens out of the policy gradient `r A` (M2PO, DPPO). The last three need a token's probability under behaviour
and current policy only."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from learners.losses.clipped import centre_of, clipped_surrogate
from learners.losses.contract import (
    LossBatch,
    MinibatchPlan,
    Observed,
    clips_finely,
    log_ratio,
    planned,
    ratio,
    ratio_to_behaviour,
    required,
    sequence_means,
    total,
    wants_proximal,
)


@clips_finely
@wants_proximal
@ratio_to_behaviour
def gspo(
    batch: LossBatch,
    denominator: float,
    *,
    clip: Annotated[float, "(0, 1]"] = 3e-4,
    clip_high: Annotated[float, "(0, inf)"] | None = 4e-4,
    dual_clip: Annotated[float, "(1, inf]"] | None = None,
    proximal: Literal["recompute", "interpolate"] | None = None,
    per_token: bool = False,
) -> tuple[Tensor, Observed]:
    """GSPO (arXiv 2507.18071, its s_i): PPO-clip on the sequence's ratio, its tokens' geometric mean: every token has
    the objective `min(s A, clip(s) A)` with `s = exp(mean over the sequence of log(current/behaviour))`. The paper's
    mean over sequences is the learner's `normalise: sequence_mean`. With `proximal` the ratio is current/proximal, as
    in `decoupled_ppo`, and the behaviour policy is left to the correction. `per_token` is the paper's GSPO-token
    (equations 13, 14), for advantages per token: s has the same value, and the gradient of the token's own logprob."""
    centre = batch.behaviour if proximal is None else centre_of(batch, proximal, "gspo")
    moved = log_ratio(batch.current, centre, batch.mask)
    sequence_ratio = sequence_means(moved, batch).exp()
    if per_token:
        sequence_ratio = sequence_ratio.detach() * ratio(batch.current, batch.current.detach(), batch.mask)
    advantages = torch.where(batch.mask, batch.advantages, 0.0)  # a masked token's would reach its sequence's gradient
    objective, flat = clipped_surrogate(sequence_ratio, advantages, clip, clip_high, dual_clip)
    return total(objective, batch, denominator), {"ratio": sequence_ratio.detach(), "clip_share": flat}


@ratio_to_behaviour
def sapo(
    batch: LossBatch,
    denominator: float,
    *,
    temperature: Annotated[float, "(0, inf)"] = 1.0,
    temperature_negative: Annotated[float, "(0, inf)"] = 1.05,
) -> tuple[Tensor, Observed]:
    """SAPO (arXiv 2511.20347): a soft clip, `4/τ · sigmoid(τ (r − 1)) · A` with r = current/behaviour. Its slope by r
    is 1 on-policy and falls smoothly on both sides: τ is `temperature` where A > 0, `temperature_negative` elsewhere.
    The paper's mean is `normalise: sequence_mean`. Formula and temperatures as in TRL's and AReaL's code."""
    moved = ratio(batch.current, batch.behaviour, batch.mask)
    tau = torch.where(batch.advantages > 0, moved.new_tensor(temperature), moved.new_tensor(temperature_negative))
    gate = 4.0 / tau * torch.sigmoid(tau * (moved - 1.0))
    return total(gate * batch.advantages, batch, denominator), {"ratio": moved.detach(), "soft_gate": gate.detach()}


def second_moment_mask(batch: LossBatch, *, threshold: float = 0.04) -> tuple[Tensor, Observed]:
    """M2PO's mask over a minibatch: 1 for tokens that stay, [N]. Drops the tokens with the largest squared log ratio
    until the mean of the others is at most `threshold`; ties leave in the order of the tokens. Perhaps no token stays.
    """
    squared = log_ratio(batch.current, batch.behaviour, batch.mask).double() ** 2
    squared = torch.where(batch.mask, squared, torch.inf)  # masked tokens sort behind all others
    order = squared.argsort(stable=True)
    ranked = squared[order]
    means = ranked.cumsum(0) / torch.arange(1, len(ranked) + 1, device=ranked.device)
    kept = torch.zeros_like(batch.mask)
    kept[order[means <= threshold]] = True
    return kept.to(batch.advantages.dtype), {"masked_share": ~kept}


@ratio_to_behaviour
@planned(MinibatchPlan(second_moment_mask))
def m2po(
    batch: LossBatch, denominator: float, *, threshold: Annotated[float, "(0, inf]"] = 0.04
) -> tuple[Tensor, Observed]:
    """M2PO (arXiv 2510.01161): `M r A` with r = current/behaviour, no clip; M keeps the mean of (log r)² over a
    minibatch below `threshold`, so only outliers are lost, however stale the rest. M is made from logprobs before the
    update. The denominator is over all trained tokens, as in the paper."""
    moved = ratio(batch.current, batch.behaviour, batch.mask)
    weights = required(batch.weights, "the mask that its plan makes", "m2po")
    objective = torch.where(weights > 0, moved * batch.advantages, 0.0)
    return total(objective, batch, denominator), {"ratio": moved.detach()}


@ratio_to_behaviour
def dppo(
    batch: LossBatch,
    denominator: float,
    *,
    tv: Annotated[float, "(0, 1]"] = 0.2,
    tv_high: Annotated[float, "(0, 1]"] | None = None,
) -> tuple[Tensor, Observed]:
    """DPPO with the binary total variation (arXiv 2602.04879; as in prime-rl): `M r A` with r = current/behaviour. The
    divergence is taken at the sampled token alone: |π − π_b|. M leaves out tokens with A > 0 whose probability has
    risen by more than `tv_high` (default `tv`), and those with A < 0 that has fallen by more than `tv`. No further clip
    and no KL term, unlike prime-rl's."""
    high = tv if tv_high is None else tv_high
    moved = ratio(batch.current, batch.behaviour, batch.mask)
    risen = (batch.current.exp() - batch.behaviour.exp()).detach()
    outside = torch.where(batch.advantages > 0, risen > high, (batch.advantages < 0) & (risen < -tv))
    objective = torch.where(outside, 0.0, moved * batch.advantages)
    return total(objective, batch, denominator), {"ratio": moved.detach(), "masked_share": outside}
