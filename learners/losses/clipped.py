"""Losses that clip a probability ratio: once the policy has moved far enough, a token has no gradient. A ratio to the
proximal policy leaves proximal/behaviour to a correction (`learners.losses.corrections`)."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from learners.losses.contract import (
    IMPOSSIBLE,
    LossBatch,
    Observed,
    log_ratio,
    ratio,
    ratio_to_behaviour,
    required,
    total,
    wants_proximal,
)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip: float, clip_high: float | None, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """PPO's `min(r A, clip(r, 1 − clip, 1 + clip_high) A)` [N], and where it is flat in r (bool [N]). `clip_high`
    (DAPO, arXiv 2503.14476, equation 8) defaults to `clip`. `dual_clip` > 1 bounds the objective of negative advantages
    from below by `dual_clip · A` (arXiv 1912.09729, equation 5)."""
    high = 1.0 + (clip if clip_high is None else clip_high)
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - clip, high) * advantages
    objective = torch.minimum(plain, clipped)
    flat = clipped < plain
    if dual_clip is not None:
        floor = dual_clip * advantages
        bounded = (advantages < 0) & (objective < floor)
        objective = torch.where(bounded, floor, objective)
        flat = flat | bounded
    return objective, flat


@ratio_to_behaviour
def ppo(
    batch: LossBatch,
    denominator: float,
    *,
    clip: Annotated[float, "(0, 1]"] = 0.2,
    clip_high: Annotated[float, "(0, inf)"] | None = None,
    dual_clip: Annotated[float, "(1, inf]"] | None = None,
) -> tuple[Tensor, Observed]:
    """PPO-clip (arXiv 1707.06347, equation 7) on current/behaviour: corrects for and clips against behaviour."""
    moved = ratio(batch.current, batch.behaviour, batch.mask)
    objective, flat = clipped_surrogate(moved, batch.advantages, clip, clip_high, dual_clip)
    return total(objective, batch, denominator), {"ratio": moved.detach(), "clip_share": flat}


@wants_proximal
def decoupled_ppo(
    batch: LossBatch,
    denominator: float,
    *,
    clip: Annotated[float, "(0, 1]"] = 0.2,
    clip_high: Annotated[float, "(0, inf)"] | None = None,
    dual_clip: Annotated[float, "(1, inf]"] | None = None,
    proximal: Literal["recompute", "interpolate"] = "recompute",
) -> tuple[Tensor, Observed]:
    """PPO-clip around the proximal policy, `min(u A, clip(u) A)`: equation 5 of AReaL (arXiv 2505.24298) but for its
    weight. `u` = current/proximal is clipped, so the trust region is centred on the learner's own policy at the start
    of the train step. The weight proximal/behaviour is the correction's, by default `capped`; with `icepop` this is
    IcePop (Ring-1T, arXiv 2510.18855). `proximal`: "recompute" by a forward pass at the start of the step, or
    "interpolate" (`interpolated`, A-3PO)."""
    centre = centre_of(batch, proximal, "decoupled_ppo")
    moved = ratio(batch.current, centre, batch.mask)
    objective, flat = clipped_surrogate(moved, batch.advantages, clip, clip_high, dual_clip)
    return total(objective, batch, denominator), {"ratio": moved.detach(), "clip_share": flat}


def centre_of(batch: LossBatch, proximal: str, loss: str) -> Tensor:
    """The proximal policy's logprobs [N], by the knob of this name."""
    if proximal == "interpolate":
        return interpolated(batch)
    return required(batch.proximal, "proximal logprobs", loss).detach()


def interpolated(batch: LossBatch) -> Tensor:
    """Proximal logprobs [N] without a forward pass (A-3PO, arXiv 2512.06547), without gradient: `log proximal = log
    behaviour + d/(d + 1) · (log current − log behaviour)` for a token that was sampled d versions before the start of
    this train step, which makes the next version. The paper's d is our d + 1. It is exact for fresh tokens."""
    staleness = batch.staleness.to(batch.behaviour.dtype)
    moved = log_ratio(batch.current.detach(), batch.behaviour, batch.mask)
    return batch.behaviour.clamp(min=IMPOSSIBLE) + staleness / (staleness + 1.0) * moved
