"""Scores one batch under many losses at the same weights: what would each loss do with the same trajectories?

A loss is a function of its tokens' logprobs, so each loss costs one small backward pass for its *pull*, dloss/dlogprob
of each trained token [N]; the pulls then go through the model, a backward pass for each loss and bucket of staleness,
micro-batch by micro-batch. The batch counts as one minibatch at the start of its train step, where the proximal policy
is the current one. Only the policy loss is scored: neither entropy bonus nor KL in the loss nor critic.

`scripts.score` builds one in place of the learner of a recorded run, and trains it along the record between scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal_like.types import Batch
from learners.diagnostics import buckets
from learners.learner import TorchLearner
from learners.logprobs import forward_logprobs
from learners.losses.contract import LossFunction, leaves_out, needs_proximal, planned_for
from learners.step import Step


@dataclass(frozen=True)
class Score:
    """One loss on one batch, overall or in a bucket of staleness; T trained tokens.

    `gradient` float32 [parameters], on the CPU. Relative to the pull A · share/denominator of the plain policy
    gradient, the loss gives each token with A ≠ 0 a weight: `ess` is Kish's effective sample size of their magnitudes,
    as a share of these tokens (NaN without any), `weight` their mean. `active` is the share of the T tokens with a pull
    at all.
    """

    gradient: Tensor
    ess: float
    weight: float
    active: float
    tokens: int


class ScoringLearner(TorchLearner):
    """A TorchLearner that can also score."""

    def score(self, batch: Batch, losses: Mapping[str, LossFunction]) -> dict[str, dict[str, Score]]:
        """Loss → bucket ("" for all, "/staleness_2", ...) → score. Weights, optimizer and metrics stay as they are."""
        step = self._begin(batch)
        step.draw(self._seed)
        trained = np.flatnonzero(step.columns.lengths)
        if not self._critic:
            for part, logprobs in self._passes.logprobs(step.columns, [trained]):
                step.proximal[part.trained] = logprobs
        denominator = self.objective.denominator(step.columns, trained)
        pulls = {name: self._pull(step, loss, denominator) for name, loss in losses.items()}
        staleness = step.staleness.cpu().numpy()
        members = {suffix: step.on_device(inside) for suffix, inside in buckets(staleness)}
        gradients = self._gradients(step, trained, pulls, members)
        plain = -step.advantages / denominator * (1.0 if step.share is None else step.share)
        everything = {"": torch.ones_like(step.staleness, dtype=torch.bool), **members}
        return {
            name: {
                suffix: _score(gradients[name, suffix], pull[inside], plain[inside])
                for suffix, inside in everything.items()
            }
            for name, pull in pulls.items()
        }

    def _pull(self, step: Step, loss: LossFunction, denominator: float) -> Tensor:
        """dloss/dlogprob of every trained token: [N]."""
        places = torch.arange(len(step.proximal), device=self.model.device)
        share, step.weights, step.factors, step.counted = step.share, None, None, step.columns
        whole = step.loss_batch(places, step.proximal, step.sample, with_proximal=needs_proximal(loss))
        planned, _ = planned_for(loss, whole)
        step.plan(places, planned.weights, planned.factors)
        if leaves_out(loss):
            step.leave_out(self.objective.shares)
            denominator = self.objective.denominator(step.counted, np.flatnonzero(step.counted.lengths)) or 1.0
        current = step.proximal.clone().requires_grad_()
        value, _ = loss(step.loss_batch(places, current, step.sample, needs_proximal(loss)), denominator)
        step.share = share
        (pull,) = torch.autograd.grad(value, [current], allow_unused=True, materialize_grads=True)
        return pull

    def _gradients(
        self, step: Step, samples: np.ndarray, pulls: Mapping[str, Tensor], members: Mapping[str, Tensor]
    ) -> dict[tuple[str, str], Tensor]:
        """(loss, bucket) → gradient; with the bucket "" for the sum over buckets, which is the whole gradient."""
        sums: dict[tuple[str, str], Tensor] = {}
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for part in self._passes.microbatches(step.columns, samples):
            with self._passes.precision():
                current, _ = forward_logprobs(self.model, part, self._temperature)
            present = [(suffix, inside[part.trained]) for suffix, inside in members.items()]
            present = [(suffix, here) for suffix, here in present if here.any()]
            for name, pull in pulls.items():
                for suffix, here in present:
                    one = torch.where(here, pull[part.trained], 0.0)
                    found = torch.autograd.grad(
                        current, parameters, one, retain_graph=True, allow_unused=True, materialize_grads=True
                    )
                    flat = torch.cat([gradient.flatten() for gradient in found]).float().cpu()
                    for key in ((name, suffix), (name, "")):
                        sums[key] = sums[key] + flat if key in sums else flat
        return sums


def _score(gradient: Tensor, pull: Tensor, plain: Tensor) -> Score:
    pull, plain = pull.double(), plain.double()
    comparable = plain != 0
    weights = pull[comparable].abs() / plain[comparable].abs()
    squares = float((weights**2).sum())
    ess = float(weights.sum() ** 2) / (len(weights) * squares) if squares else float("nan")
    weight = float(weights.mean()) if len(weights) else float("nan")
    return Score(gradient, ess, weight, float((pull != 0).double().mean()), len(pull))
