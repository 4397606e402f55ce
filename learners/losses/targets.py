"""Losses that fit the policy to a target by likelihood, with no ratio to clip: PMPO and TPO.

Both normalise over a whole minibatch, so a plan computes their weights (`contract.Plan`).
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from learners.losses.contract import (
    IMPOSSIBLE,
    LossBatch,
    Observed,
    Plan,
    current_logprobs,
    log_ratio,
    planned,
    required,
    score_loss,
    shares,
    total,
)


def preference_weights(batch: LossBatch, *, alpha: float = 0.5, beta: float = 0.1) -> tuple[Tensor, Observed]:
    """PMPO's weight per token of a minibatch [N]: α S/S₊ where A > 0, −(1 − α) S/S₋ where A < 0, else 0.

    S sums the tokens' shares: all, those of positive and those of negative advantage. Divided by a denominator of S,
    as the learner's means over tokens and over sequences are, the sums become PMPO's two means.
    """
    if not 0.0 <= alpha <= 1.0 or beta < 0.0:
        raise ValueError(f"alpha must lie in [0, 1] and beta must not be negative, got {alpha} and {beta}")
    share = shares(batch)
    good, bad = batch.mask & (batch.advantages > 0), batch.mask & (batch.advantages < 0)
    everything = share.sum()
    up = alpha * everything / share[good].sum() if good.any() else 0.0
    down = (1.0 - alpha) * everything / share[bad].sum() if bad.any() else 0.0
    zeros = torch.zeros_like(share)
    return torch.where(good, up, zeros) - torch.where(bad, down, zeros), {}


@planned(Plan(preference_weights, needs_current=False))
def pmpo(
    batch: LossBatch,
    denominator: float,
    *,
    alpha: Annotated[float, "[0, 1]"] = 0.5,
    beta: Annotated[float, "[0, inf)"] = 0.1,
) -> tuple[Tensor, Observed]:
    """PMPO (arXiv 2410.04166): raises the likelihood of good samples, lowers that of bad ones, near the behaviour
    policy.

    `α mean₊ log π − (1 − α) mean₋ log π − β KL(reference ‖ π)`, where only the advantage's sign counts. The reference
    is the behaviour policy, so the KL is estimated without bias by `log π_b − log π` on the sampled tokens, and
    corrects for distance only. α and β are those of DG's authors. The means are over tokens; the paper's over sequences
    are the learner's `normalise: sequence_mean`.
    """
    weights = required(batch.weights, "the weights that its plan makes", "pmpo")
    near = log_ratio(batch.current, batch.behaviour, batch.mask)
    held = torch.where(batch.mask, weights, 0.0)
    loss = total(held * current_logprobs(batch) + beta * near, batch, denominator)
    return loss, {"ratio": near.detach().exp()}


def target_weights(batch: LossBatch, *, temperature: float = 1.0) -> tuple[Tensor, Observed]:
    """TPO's gradient on each sequence's logprob, for each of its tokens: (q − p) · S/groups, [N].

    p and q are the policy and its target over the samples of a group; S sums the tokens' shares.
    """
    if temperature <= 0.0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    group = required(batch.group, "group numbers", "tpo")
    mask, share = batch.mask, shares(batch)
    firsts, of_token, group_of = _sequences(batch.sequence[mask], group[mask])
    if not len(firsts):
        return torch.zeros_like(share), {}
    current = _sums(current_logprobs(batch)[mask].double(), of_token)
    behaviour = _sums(batch.behaviour[mask].double().clamp(min=IMPOSSIBLE), of_token)
    score = batch.advantages[mask].double()[firsts]
    target = _softmax(behaviour + _standardised(score, group_of) / temperature, group_of)
    pull = target - _softmax(current, group_of)
    weights = torch.zeros_like(share)
    weights[mask] = (pull[of_token] * share.sum() / (int(group_of.max()) + 1)).to(share.dtype)
    return weights, {"target_gap": torch.zeros_like(share).masked_scatter(mask, pull.abs().to(share.dtype)[of_token])}


@planned(Plan(target_weights))
def tpo(
    batch: LossBatch, denominator: float, *, temperature: Annotated[float, "(0, inf)"] = 1.0
) -> tuple[Tensor, Observed]:
    """Target Policy Optimization (arXiv 2604.06159): cross-entropy from a target over a group's samples to the policy.

    p = softmax of the samples' summed logprobs under the current policy, `q ∝ p_behaviour · exp(z/temperature)`, z the
    advantages standardised within the group (all 0 where they are equal). The gradient `(p_i − q_i) ∇log π(sample i)`
    vanishes once the policy is at its target, so several passes over a batch are possible.

    The value reported is the score function's, not the cross-entropy; the gradient is the paper's mean over groups
    (under `normalise: token_mean`). p and q come from the minibatch's logprobs before the update, so the gradient is
    exact at that point, as the paper's is. It expects one advantage per sequence, and uses the first token's.
    """
    weights = required(batch.weights, "the weights that its plan makes", "tpo")
    return score_loss(weights, batch, denominator), {}


def _sequences(sequence: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of trained tokens: the place of each sequence's first one, each token's sequence from 0, each sequence's group
    from 0."""
    numbers, of_token = sequence.unique(return_inverse=True)
    places = torch.arange(len(sequence), device=sequence.device)
    firsts = torch.full_like(numbers, len(sequence)).scatter_reduce(0, of_token, places, "amin")
    return firsts, of_token, group[firsts].unique(return_inverse=True)[1]


def _sums(values: Tensor, owner: Tensor) -> Tensor:
    """Sum per owner: [owners]."""
    return values.new_zeros(int(owner.max()) + 1).index_add(0, owner, values)


def _standardised(scores: Tensor, group: Tensor) -> Tensor:
    """(score − mean)/standard deviation within each group; 0 where a group's scores are equal up to 1e-6."""
    counts = _sums(torch.ones_like(scores), group)[group]
    centred = scores - _sums(scores, group)[group] / counts
    deviation = (_sums(centred**2, group)[group] / counts).sqrt()
    return torch.where(deviation > 1e-6, centred / deviation, 0.0)


def _softmax(logits: Tensor, group: Tensor) -> Tensor:
    """Softmax within each group."""
    highest = torch.full_like(logits, -torch.inf)[: int(group.max()) + 1].scatter_reduce(0, group, logits, "amax")
    weights = (logits - highest[group]).exp()
    return weights / _sums(weights, group)[group]
