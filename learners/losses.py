"""Policy losses: pure functions from per-token logprobs and advantages to a scalar and its metrics.

Every loss has the form `(batch, denominator, *, knobs) -> (loss, metrics)`. The loss is a SUM over the trained tokens
of a micro-batch divided by the `denominator` passed in, so how a minibatch is cut into micro-batches cannot change
its gradient. Metrics are sums over trained tokens (the caller divides by their number), except for names that end in
`/max`, which the caller combines by maximum.

Three policies, named the same everywhere: *behaviour* sampled the token, *proximal* is the learner's policy at the
start of the train step (only for losses marked with `@wants_proximal`), *current* carries the gradient.

Masked tokens may hold any value, NaN included: they change neither the loss nor its gradient. Log ratios are clamped
to ±`LOG_RATIO_LIMIT`, so a token that one of the policies finds impossible stays finite (and has no gradient).

The learner calls these; they know nothing of models, batches on the wire or devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0

Metrics = dict[str, Tensor]
LossFunction = Callable[["LossBatch", float], tuple[Tensor, Metrics]]
"""A loss whose knobs are bound."""


@dataclass(slots=True)
class LossBatch:
    """The response tokens of one micro-batch, flat [N]; a sequence is never split over micro-batches.

    Logprobs and advantages are floating point, `current` with gradient; `mask` is bool, True where the token is
    trained; `sequence` int64 numbers the sequence of each token from 0 within the micro-batch; `staleness` int64 is
    train version − version of the token.
    """

    current: Tensor
    behaviour: Tensor
    proximal: Tensor | None
    advantages: Tensor
    mask: Tensor
    sequence: Tensor
    staleness: Tensor


def wants_proximal(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a loss that needs `LossBatch.proximal`."""
    loss.needs_proximal = True  # type: ignore[attr-defined]
    return loss


def needs_proximal(loss: Callable[..., Any]) -> bool:
    """Whether a loss, bare or bound with `functools.partial`, is marked with `wants_proximal`."""
    return getattr(getattr(loss, "func", loss), "needs_proximal", False)


def ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """Probability ratio [N] of two logprobs [N]: finite, and 1 where the mask is False."""
    difference = torch.where(mask, numerator - denominator, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` [N] where `mask` [N] is True."""
    return torch.where(mask, values, 0.0).sum()


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Maximum of positive `values` [N] where `mask` [N] is True; 0 where it is True nowhere."""
    return torch.where(mask, values, 0.0).max() if values.numel() else values.new_zeros(())


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip: float, clip_high: float | None, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """PPO's `min(r A, clip(r, 1 − clip, 1 + clip_high) A)` [N], and where it is flat in r (bool [N]).

    `clip_high` (DAPO's clip-higher, arXiv 2503.14476) defaults to `clip`. `dual_clip` > 1 bounds the objective of
    negative advantages from below by `dual_clip · A` (arXiv 1912.09729), so a huge ratio cannot blow up the step.
    """
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


def check_clip(clip: float, clip_high: float | None, dual_clip: float | None) -> None:
    """Raise ValueError for clip knobs that make no sense."""
    if not 0.0 < clip <= 1.0:
        raise ValueError(f"clip must lie in (0, 1], got {clip}")
    if clip_high is not None and clip_high <= 0.0:
        raise ValueError(f"clip_high must be positive, got {clip_high}")
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")


def ppo(
    batch: LossBatch,
    denominator: float,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO-clip (arXiv 1707.06347) on the ratio current/behaviour: both corrects for and clips against behaviour."""
    check_clip(clip, clip_high, dual_clip)
    mask = batch.mask
    current_over_behaviour = ratio(batch.current, batch.behaviour, mask)
    objective, flat = clipped_surrogate(current_over_behaviour, batch.advantages, clip, clip_high, dual_clip)
    loss = -masked_sum(objective, mask) / denominator
    return loss, _clip_metrics(current_over_behaviour, flat, mask)


@wants_proximal
def decoupled_ppo(
    batch: LossBatch,
    denominator: float,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    behaviour_cap: float | None = 5.0,
    cap_mode: Literal["mask", "clamp"] = "mask",
) -> tuple[Tensor, Metrics]:
    """Decoupled PPO, equation 5 of AReaL (arXiv 2505.24298): `w · min(u A, clip(u) A)`.

    `w` = proximal/behaviour (no gradient) corrects for who sampled the token; `u` = current/proximal is what is
    clipped, so the trust region is centred on the learner's own policy at the start of the train step, however old
    the data are. Where `w` > `behaviour_cap` the token is left out ("mask") or `w` is set to the cap ("clamp"); the
    denominator counts such tokens all the same. None means no cap.
    """
    check_clip(clip, clip_high, dual_clip)
    if batch.proximal is None:
        raise ValueError("decoupled_ppo needs proximal logprobs")
    if cap_mode not in ("mask", "clamp"):
        raise ValueError(f"cap_mode must be 'mask' or 'clamp', got {cap_mode!r}")
    mask = batch.mask
    weight = ratio(batch.proximal, batch.behaviour, mask).detach()
    current_over_proximal = ratio(batch.current, batch.proximal.detach(), mask)
    objective, flat = clipped_surrogate(current_over_proximal, batch.advantages, clip, clip_high, dual_clip)
    capped_weight, capped = _cap(weight, behaviour_cap, cap_mode)
    loss = -masked_sum(capped_weight * objective, mask) / denominator
    metrics = _clip_metrics(current_over_proximal, flat, mask)
    metrics["behaviour_weight/mean"] = masked_sum(weight, mask)
    metrics["behaviour_weight/max"] = masked_max(weight, mask)
    metrics["capped_share"] = masked_sum(capped.to(weight.dtype), mask)
    return loss, metrics


def _cap(weight: Tensor, cap: float | None, mode: str) -> tuple[Tensor, Tensor]:
    if cap is None:
        return weight, torch.zeros_like(weight, dtype=torch.bool)
    capped = weight > cap
    return torch.where(capped, 0.0 if mode == "mask" else cap, weight), capped


def _clip_metrics(ratio: Tensor, flat: Tensor, mask: Tensor) -> Metrics:
    ratio = ratio.detach()
    return {
        "clip_share": masked_sum(flat.to(ratio.dtype), mask),
        "ratio/mean": masked_sum(ratio, mask),
        "ratio/max": masked_max(ratio, mask),
    }
