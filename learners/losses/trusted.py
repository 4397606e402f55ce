"""Losses that leave tokens out instead of clipping them: the policy gradient `r A` inside a trust region.

Both need a token's probability under behaviour and current policy only.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from learners.losses.contract import (
    LossBatch,
    MinibatchPlan,
    Observed,
    log_ratio,
    planned,
    ratio,
    ratio_to_behaviour,
    required,
    total,
)


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
