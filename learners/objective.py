"""The terms around the policy loss, and the denominator of the sum over tokens. Pure; the learner drives it.

`objective = policy loss + kl_loss · KL(policy ‖ reference) − entropy_bonus · entropy`, all three as sums over trained
tokens with the same shares and the same denominator.
"""

import copy
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_like.types import Batch, Sample
from learners.advantages import Advantage, Episodes, marked, turns_of
from learners.losses.contract import IMPOSSIBLE, LOG_RATIO_LIMIT, LossBatch, ratio
from learners.packing import Columns
from learners.step import Step


class Objective:
    """The terms around the policy loss.

    `normalise`: "token_mean" divides by the trained tokens of the minibatch (DAPO, arXiv 2503.14476); "sequence_mean"
    takes the mean over each sequence, then over sequences (GRPO, arXiv 2402.03300); a number L divides by L times the
    sequences (Dr. GRPO, arXiv 2503.20783, where L is the longest response; "response_limit" in a config, see
    `learners.build`). Sequences without a trained token do not count.

    `entropy_bonus` × the entropy (nats) is added to the objective. `kl_loss` × the KL to the reference is subtracted
    from it, with the gradient of `kl_loss_estimator`; with `kl_loss_weighted` times current/behaviour, whose gradient
    counts, too (DeepSeek-V3.2, arXiv 2512.02556). `kl_reward` × the KL of the behaviour policy to the reference is
    subtracted from the reward, token by token, as k1 (`kl_estimate`). The reference is the model's initial weights.

    `overlong_penalty` × DAPO's punishment of answers near `overlong_limit` tokens is subtracted from the reward; it
    grows over the last `overlong_buffer` tokens. With `overlong_filter` answers that were cut at the limit of length
    are not trained. The remaining reward is multiplied by `reward_scale`, then cut at ± `reward_clip`, if that is a
    number. Advantages see the result; metrics and samples keep the reward itself.

    `ess_scale` multiplies the learning rate of each optimizer step by the square root of `effective_share` (VCPO, arXiv
    2602.17616, section 3.2, where data of the current policy have the share 1). Raises ValueError for a buffer above
    its limit.
    """

    def __init__(  # noqa: PLR0913 - a component's knobs are its keyword-only parameters
        self,
        *,
        normalise: Literal["token_mean", "sequence_mean", "response_limit"]
        | Annotated[float, "(0, inf)"] = "token_mean",
        entropy_bonus: Annotated[float, "(-inf, inf)"] = 0.0,
        kl_loss: Annotated[float, "[0, inf)"] = 0.0,
        kl_loss_estimator: Literal["k1", "k2", "k3"] = "k3",
        kl_loss_weighted: bool = False,
        kl_reward: Annotated[float, "[0, inf)"] = 0.0,
        overlong_penalty: Annotated[float, "[0, inf)"] = 0.0,
        overlong_limit: Annotated[int, "[0, inf)"] = 0,
        overlong_buffer: Annotated[int, "[0, inf)"] = 0,
        overlong_filter: bool = False,
        reward_scale: Annotated[float, "(0, inf)"] = 1.0,
        reward_clip: Annotated[float, "(0, inf)"] | None = None,
        ess_scale: bool = False,
    ):
        if overlong_penalty and not 0 <= overlong_buffer <= overlong_limit != 0:
            raise ValueError(
                f"overlong_buffer: got {overlong_buffer} with overlong_limit={overlong_limit}, expected less"
            )
        self.normalise, self.entropy_bonus = normalise, entropy_bonus
        self.kl_loss, self.kl_loss_estimator, self.kl_loss_weighted = kl_loss, kl_loss_estimator, kl_loss_weighted
        self.kl_reward, self.overlong_filter, self.ess_scale = kl_reward, overlong_filter, ess_scale
        self.reward_scale, self.reward_clip = reward_scale, np.inf if reward_clip is None else reward_clip
        self.overlong_penalty, self.overlong = overlong_penalty, (overlong_limit, overlong_buffer)
        self.needs_reference = bool(kl_loss or kl_reward)

    def shares(self, columns: Columns) -> np.ndarray | None:
        """Each trained token's weight in the sums, float32 [N]; None where it is 1."""
        if self.normalise != "sequence_mean":
            return None
        return (1.0 / columns.trained_counts[columns.sample]).astype(np.float32)

    def denominator(self, columns: Columns, samples: np.ndarray) -> float:
        """The denominator of the sums over the given samples' trained tokens."""
        if self.normalise == "token_mean":
            return float(columns.trained_tokens(samples))
        sequences = float(np.count_nonzero(columns.trained_counts[samples]))
        return sequences if self.normalise == "sequence_mean" else sequences * float(self.normalise)

    def rewards(self, batch: Batch, penalties: np.ndarray) -> np.ndarray:
        """The samples' rewards minus these penalties, scaled and cut: float64 [n]."""
        rewards = np.array([s.reward for s in batch.samples], np.float64) - penalties
        return np.clip(rewards * self.reward_scale, -self.reward_clip, self.reward_clip)

    def advantages(self, step: Step, advantage: Advantage, student: Tensor) -> np.ndarray:
        """Each trained token's advantage [N]. `student` [N]: the logprobs to compare with a teacher's."""
        columns, samples, (limit, buffer) = step.columns, step.batch.samples, self.overlong
        lengths = np.array([s.reach for s in samples])
        less = self.overlong_penalty * overlong_penalty(lengths, limit=limit, buffer=buffer)
        penalties = np.zeros(len(step.behaviour))
        if step.reference is not None and self.kl_reward:
            kl = kl_estimate(step.behaviour.double(), step.reference.double(), "k1")
            penalties = self.kl_reward * kl.cpu().numpy()
        step.note_penalties(less, penalties)
        compared = [] if step.teacher is None else [step.teacher, student]
        known = (each.double().cpu().numpy() for each in compared)
        rewards = self.rewards(step.batch, less)
        # What `reward_clip` takes from the whole reward, it takes at the sample's end.
        earned = [[(place, self.reward_scale * reward) for place, reward in s.turn_rewards] for s in samples]
        turns = turns_of(earned, columns.sample, columns.place)
        episodes = Episodes(rewards, step.groups, columns.sample, penalties, turns, *known)
        if marked(advantage, "per_token"):
            return advantage(episodes)
        return advantage(episodes.per_sample(), step.groups)[columns.sample]

    def with_terms(
        self, loss: Tensor, logprobs: Tensor, entropy: Tensor, reference: Tensor | None, batch: LossBatch, by: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy loss of a micro-batch plus the other terms, and their observations.

        `logprobs`, `entropy`, `reference`: [N], the first two with gradient; `by` the denominator.
        """
        observed, share = {"entropy": entropy}, batch.share
        if self.entropy_bonus:
            shared = entropy if share is None else entropy * share
            loss = loss - self.entropy_bonus / by * shared.sum()
        if reference is not None:
            kl = kl_estimate(logprobs, reference, self.kl_loss_estimator)
            observed["reference_kl"] = kl_estimate(logprobs.detach(), reference, "k3")
            if self.kl_loss_weighted:
                kl = kl * ratio(logprobs, batch.behaviour, batch.mask)
            if self.kl_loss:
                loss = loss + self.kl_loss / by * (kl if share is None else kl * share).sum()
        return loss, {name: values.detach() for name, values in observed.items()}


def frozen(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of the model as it will be published first, without gradients."""
    reference = copy.deepcopy(model).requires_grad_(False)
    for p in reference.parameters():
        p.copy_(p.to(dtype))
    return reference


def kl_estimate(policy: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Per-token estimates [N] of KL(policy ‖ reference) from logprobs [N] of tokens that the policy sampled, in nats.

    Schulman's (joschu.net/blog/kl-approx.html), with d = log policy − log reference within ±20: k1 = d (unbiased, may
    be negative); k2 = d²/2; k3 = exp(−d) − 1 + d (unbiased, never negative; GRPO's, arXiv 2402.03300). As losses they
    have other gradients (arXiv 2506.09477): k2's is the KL's own; k1's is zero on average; k3's is the KL's to first
    order near the reference.
    """
    difference = policy.clamp(min=IMPOSSIBLE) - reference.clamp(min=IMPOSSIBLE)
    difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return difference
    return 0.5 * difference**2 if estimator == "k2" else torch.exp(-difference) - 1.0 + difference


def overlong_penalty(lengths: np.ndarray, *, limit: int, buffer: int) -> np.ndarray:
    """DAPO's soft punishment of length (arXiv 2503.14476, equation 13), to subtract from the reward: [n], 0 to 1.

    `lengths` [n] response tokens. 0 up to `limit` − `buffer`, then linear, 1 from `limit` on. Without a buffer it is a
    step at `limit`, which is the length of an answer that was cut there.
    """
    over = np.asarray(lengths, np.float64) - (limit - buffer)
    return np.clip(over / buffer, 0.0, 1.0) if buffer else (over >= 0).astype(np.float64)


def without_cut_answers(batch: Batch) -> Batch:
    """The batch with all tokens of answers that were cut at the limit of length masked out: DAPO's overlong filtering
    (arXiv 2503.14476, section 3.4), `mask_truncated_completions` in TRL. As there, their rewards still count in their
    groups' baselines."""

    def masked(sample: Sample) -> Sample:
        return replace(sample, loss_mask=np.zeros_like(sample.loss_mask)) if sample.finish == "length" else sample

    groups = [replace(group, samples=[masked(sample) for sample in group.samples]) for group in batch.groups]
    return replace(batch, groups=groups)


def effective_share(log_weights: np.ndarray) -> float:
    """Kish's effective sample size as a share of n sequences, (Σ w)² / (n Σ w²), from the logarithms of their
    importance weights current/behaviour, float64 [n], neither cut nor normalised. 1 without any."""
    weights = np.exp(log_weights - log_weights.max(initial=-np.inf))
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())) if len(weights) else 1.0
