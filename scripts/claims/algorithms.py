"""The compared algorithms: losses of `learners.losses`, applied to many independent learners at once.

Learners share no parameters, so the gradient of the sum of their losses is each learner's own. A loss that is a sum
over tokens sees all learners as one batch; a loss's plan over a minibatch is made per learner.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from learners.losses.clipped import decoupled_ppo, ppo
from learners.losses.contract import LossBatch, Observed, marks_of, planned_for
from learners.losses.corrections import capped, exact
from learners.losses.delightful import dg, dg_kondo
from learners.losses.weighted import pmpo, reinforce, tpo

Loss = Callable[..., Any]


def positive_only(batch: LossBatch, denominator: float) -> tuple[Tensor, Observed]:
    return reinforce(replace(batch, advantages=batch.advantages.clamp(min=0.0)), denominator)


ALGORITHMS: dict[str, Loss] = {
    "reinforce": reinforce,
    "exact_iw": exact(reinforce),
    "ppo": partial(ppo, clip=0.2),
    "decoupled_ppo": capped(partial(decoupled_ppo, clip=0.2)),
    "pmpo": partial(pmpo, alpha=0.5, beta=0.1),
    "tpo": tpo,
    "positive_only": positive_only,
    "dg": dg,
    "dg_kondo": partial(dg_kondo, keep=0.03),
}


def loss_of(loss: Loss, current: Tensor, behaviour: Tensor, advantages: Tensor, denominator: float) -> Tensor:
    """The sum of the losses of L learners, each over its own tokens ÷ `denominator`: a scalar with gradient.

    Logprobs are floating point [L, groups, samples, tokens], `current` with gradient; advantages [L, groups, samples],
    one per sequence. Learners make one update per batch, so the proximal policy is the current one.
    """
    learners, groups, samples, tokens = current.shape
    count = learners * groups * samples
    batch = LossBatch(
        current=current.reshape(-1),
        behaviour=behaviour.reshape(-1),
        proximal=current.detach().reshape(-1),
        advantages=advantages.unsqueeze(-1).expand(current.shape).reshape(-1),
        mask=torch.ones(count * tokens, dtype=torch.bool),
        sequence=torch.arange(count).repeat_interleave(tokens),
        staleness=torch.zeros(count * tokens, dtype=torch.long),
        group=torch.arange(learners * groups).repeat_interleave(samples * tokens),
    )
    if marks_of(loss).plan:
        columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
        parts = {name: each.detach().chunk(learners) for name, each in columns.items() if each is not None}
        own = [LossBatch(**dict(zip(parts, values, strict=True))) for values in zip(*parts.values(), strict=True)]
        weights = [planned_for(loss, each)[0].weights for each in own]
        batch = replace(batch, weights=torch.cat([each for each in weights if each is not None]))
    return loss(batch, denominator)[0]
