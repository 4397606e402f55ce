"""Losses with the gradient `w ∇log π`, without a ratio to clip; they differ in the weight w, which has no gradient. The
value of a score function, `− Σ w log π ÷ denominator`, means nothing. PMPO and TPO fit the policy to a target; they
normalise over a whole minibatch, so a plan computes their weights (`contract.MinibatchPlan`)."""

from typing import Annotated

import torch
from torch import Tensor

from learners.losses.contract import (
    IMPOSSIBLE,
    LossBatch,
    MinibatchPlan,
    Observed,
    current_logprobs,
    log_ratio,
    planned,
    required,
    score_loss,
    shares,
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


def preference_weights(batch: LossBatch, *, alpha: float = 0.5, beta: float = 0.1) -> tuple[Tensor, Observed]:
    """PMPO's weight per token of a minibatch [N]: α S/S₊ where A > 0, −(1 − α) S/S₋ where A < 0, else 0. S sums the
    tokens' shares: all, those of positive and those of negative advantage. Divided by a denominator of S the sums
    become PMPO's two means."""
    share = shares(batch)
    good, bad = batch.mask & (batch.advantages > 0), batch.mask & (batch.advantages < 0)
    everything = share.sum()
    zeros = torch.zeros_like(share)
    up = alpha * everything / torch.where(good, share, zeros).sum()  # by 0 only where nothing is good
    down = (1.0 - alpha) * everything / torch.where(bad, share, zeros).sum()
    return torch.where(good, up, zeros) - torch.where(bad, down, zeros), {}


@planned(MinibatchPlan(preference_weights, needs_current=False))
def pmpo(
    batch: LossBatch,
    denominator: float,
    *,
    alpha: Annotated[float, "[0, 1]"] = 0.5,
    beta: Annotated[float, "[0, inf)"] = 0.1,
) -> tuple[Tensor, Observed]:
    """PMPO (arXiv 2410.04166): raises the likelihood of good samples, lowers that of bad ones, near the behaviour
    policy: `α mean₊ log π − (1 − α) mean₋ log π − β KL(reference ‖ π)`, where only the advantage's sign counts. The
    reference is the behaviour policy, so the KL is estimated without bias by `log π_b − log π` on the sampled tokens. α
    and β are those of DG's authors. The paper's means over sequences are the learner's `normalise: sequence_mean`."""
    weights = required(batch.weights, "the weights that its plan makes", "pmpo")
    near = log_ratio(batch.current, batch.behaviour, batch.mask)
    held = torch.where(batch.mask, weights, 0.0)
    loss = total(held * current_logprobs(batch) + beta * near, batch, denominator)
    return loss, {"ratio": near.detach().exp()}


def target_weights(batch: LossBatch, *, temperature: float = 1.0) -> tuple[Tensor, Observed]:
    """TPO's gradient on each sequence's logprob, for each of its tokens: (q − p) · S/groups, [N].

    p and q are the policy and its target over the samples of a group; S sums the tokens' shares.
    """
    group = required(batch.group, "group numbers", "tpo")
    mask, share, owner, most = batch.mask, shares(batch), batch.sequence, batch.most_sequences
    if not len(share):
        return torch.zeros_like(share), {}
    places = torch.arange(len(owner), device=owner.device).masked_fill(~mask, len(owner))
    firsts = places.new_full((most,), len(owner)).scatter_reduce(0, owner, places, "amin")
    there, firsts = firsts < len(owner), firsts.clamp(max=len(owner) - 1)  # sequences with a trained token
    group_of = group[firsts] - group.min()  # less than `most`: the numbers of a batch's groups have no gaps
    current = _sums(torch.where(mask, current_logprobs(batch).double(), 0.0), owner, most)
    behaviour = _sums(torch.where(mask, batch.behaviour.double().clamp(min=IMPOSSIBLE), 0.0), owner, most)
    score = batch.advantages.double()[firsts]
    target = _softmax(behaviour + _standardised(score, group_of, there) / temperature, group_of, there)
    pull = target - _softmax(current, group_of, there)
    groups = (_sums(there.double(), group_of, most) > 0).sum().clamp(min=1)
    weights = torch.where(mask, pull[owner] * share.sum() / groups, 0.0).to(share.dtype)
    return weights, {"target_gap": torch.where(mask, pull.abs()[owner], 0.0).to(share.dtype)}


@planned(MinibatchPlan(target_weights))
def tpo(
    batch: LossBatch, denominator: float, *, temperature: Annotated[float, "(0, inf)"] = 1.0
) -> tuple[Tensor, Observed]:
    """Target Policy Optimization (arXiv 2604.06159): cross-entropy from a target over a group's samples to the policy.

    p = softmax of the samples' summed logprobs under the current policy, `q ∝ p_behaviour · exp(z/temperature)`, z the
    advantages standardised within the group. The gradient `(p_i − q_i) ∇log π(sample i)` vanishes once the policy is at
    its target. The value reported is the score function's; the gradient is the paper's mean over groups (under
    `normalise: token_mean`), from logprobs before the update. It uses the first token's advantage of each sequence.
    """
    weights = required(batch.weights, "the weights that its plan makes", "tpo")
    return score_loss(weights, batch, denominator), {}


def _sums(values: Tensor, owner: Tensor, most: int) -> Tensor:
    """Sum per owner: [most]."""
    return values.new_zeros(most).index_add(0, owner, values)


def _standardised(scores: Tensor, group: Tensor, there: Tensor) -> Tensor:
    """(score − mean)/standard deviation within each group of what is `there`; 0 where a group's scores are equal up to
    1e-6."""
    most, scores = len(scores), torch.where(there, scores, 0.0)
    counts = _sums(there.to(scores.dtype), group, most)[group].clamp(min=1.0)
    centred = torch.where(there, scores - _sums(scores, group, most)[group] / counts, 0.0)
    deviation = (_sums(centred**2, group, most)[group] / counts).sqrt()
    return torch.where(deviation > 1e-6, centred / deviation, 0.0)


def _softmax(logits: Tensor, group: Tensor, there: Tensor) -> Tensor:
    """Softmax within each group of what is `there`; 0 elsewhere."""
    logits = logits.masked_fill(~there, -torch.inf)
    highest = torch.full_like(logits, -torch.inf).scatter_reduce(0, group, logits, "amax")
    weights = torch.where(there, (logits - highest[group]).exp(), 0.0)
    return weights / _sums(weights, group, len(logits))[group].clamp(min=torch.finfo(logits.dtype).tiny)
