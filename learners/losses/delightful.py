"""The Delightful Policy Gradient: a gate on the learner's own surprisal, without behaviour probabilities. *Delight* χ =
A · surprisal, with surprisal = −log π(token) under the CURRENT policy. The gate passes unlikely successes, and holds
back failures that are already unlikely."""

import math
from typing import Annotated

import torch
from torch import Tensor

from learners.losses.contract import (
    LossBatch,
    MinibatchPlan,
    Observed,
    current_logprobs,
    planned,
    required,
    score_loss,
    single_pass,
)


def delight(batch: LossBatch) -> Tensor:
    """χ [N], without gradient; 0 for masked tokens."""
    return torch.where(batch.mask, -current_logprobs(batch).detach() * batch.advantages, 0.0)


@single_pass
def dg(
    batch: LossBatch,
    denominator: float,
    *,
    gate_temperature: Annotated[float, "[0, inf)"] = 1.0,
    gate_threshold: Annotated[float, "(-inf, inf)"] = 0.0,
) -> tuple[Tensor, Observed]:
    """Delightful Policy Gradient (arXiv 2603.14608; distributed: 2603.20521): `− Σ gate · A · log π ÷ denominator`.

    `gate = sigmoid((χ − λ)/η)`, one per token and without gradient; η is `gate_temperature` (0: the indicator χ > λ), λ
    is `gate_threshold`. The authors' advantage is reward − group mean without a division by the standard deviation.
    The gate weakens failures like π^(|A|/η): with advantages below 1 lower η alike.
    """
    surplus = delight(batch) - gate_threshold
    gate = torch.sigmoid(surplus / gate_temperature) if gate_temperature else (surplus > 0).to(surplus.dtype)
    return score_loss(gate * batch.advantages, batch, denominator), {"gate": gate}


def kondo_gate(batch: LossBatch, *, keep: float = 0.03) -> tuple[Tensor, Observed]:
    """1 for the tokens of a minibatch that stay, [N]: the top `keep` share by delight, rounded up to a token.

    Ties go to the earlier token. Tokens without an advantage have no gradient anyway and never stay.
    """
    chi = torch.where(batch.mask, delight(batch), -torch.inf)
    count = math.ceil(keep * int(batch.mask.sum()))
    kept = torch.zeros_like(batch.mask)
    kept[chi.argsort(descending=True, stable=True)[:count]] = True
    kept &= batch.mask & (batch.advantages != 0)
    weights = kept.to(batch.advantages.dtype)
    return weights, {"gate": weights}


@single_pass
@planned(MinibatchPlan(kondo_gate, skips=True))
def dg_kondo(
    batch: LossBatch, denominator: float, *, keep: Annotated[float, "(0, 1]"] = 0.03
) -> tuple[Tensor, Observed]:
    """The Kondo gate (arXiv 2603.20526): DG's hard gate with λ set so that a share `keep` of a minibatch's tokens
    passes: `− Σ_kept A · log π ÷ denominator`, over ALL trained tokens.

    A forward pass without gradient finds the kept tokens; only they, and the tokens that they attend to, go through the
    pass with gradient. A sequence without a kept token is skipped whole; one with some is cut behind the last.
    `backward_tokens` and `backward_share` give the cost. Other terms of the objective (entropy, KL) see kept tokens
    only.
    """
    weights = required(batch.weights, "the tokens that its plan keeps", "dg_kondo")
    return score_loss(weights * batch.advantages, batch, denominator), {}
