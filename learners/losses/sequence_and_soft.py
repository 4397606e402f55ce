"""Losses that clip otherwise than PPO: the ratio of a whole sequence (GSPO), or softly (SAPO)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from learners.losses.clipped import centre_of, clipped_surrogate
from learners.losses.contract import (
    LossBatch,
    Observed,
    clips_finely,
    log_ratio,
    ratio,
    ratio_to_behaviour,
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
) -> tuple[Tensor, Observed]:
    """GSPO (arXiv 2507.18071, its s_i): PPO-clip on the sequence's ratio, its tokens' geometric mean: every token has
    the objective `min(s A, clip(s) A)` with `s = exp(mean over the sequence of log(current/behaviour))`. The paper's
    mean over sequences is the learner's `normalise: sequence_mean`. With `proximal` the ratio is current/proximal, as
    in `decoupled_ppo`, and the behaviour policy is left to the correction."""
    centre = batch.behaviour if proximal is None else centre_of(batch, proximal, "gspo")
    moved = log_ratio(batch.current, centre, batch.mask)
    sequence_ratio = sequence_means(moved, batch).exp()
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
