"""The algorithms that are compared: losses of `learners.losses`, applied to many independent learners at once.

Learners share no parameters, so the gradient of the sum of their losses is each learner's own. So a loss that is a sum
over tokens can see all learners as one batch; a loss's plan over a minibatch is made per learner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from learners.losses.clipped import decoupled_ppo, ppo
from learners.losses.contract import LossBatch, Observed, plan_of, with_plan
from learners.losses.corrections import capped, exact
from learners.losses.delightful import dg, dg_kondo
from learners.losses.targets import pmpo, tpo
from learners.losses.weighted import reinforce


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A loss, and a change of its advantages.

    `positive_only` sets negative advantages to 0. `idle` says when a group whose advantages are all 0 has no gradient,
    so that the forward pass may skip it: if the current policy sampled it ("on_policy"), or also if another one did
    ("always").
    """

    loss: Callable[..., Any]
    positive_only: bool = False
    idle: Literal["always", "on_policy", "never"] = "always"


ALGORITHMS = {
    "reinforce": Algorithm(reinforce),
    "exact_iw": Algorithm(exact(reinforce)),
    "ppo": Algorithm(partial(ppo, clip=0.2)),
    "decoupled_ppo": Algorithm(capped(partial(decoupled_ppo, clip=0.2))),
    "pmpo": Algorithm(partial(pmpo, alpha=0.5, beta=0.1), idle="never"),
    "tpo": Algorithm(tpo, idle="on_policy"),
    "positive_only": Algorithm(reinforce, positive_only=True),
    "dg": Algorithm(dg),
    "dg_kondo": Algorithm(partial(dg_kondo, keep=0.03)),
}


def loss_of(algorithm: Algorithm, current: Tensor, behaviour: Tensor, advantages: Tensor, denominator: float) -> Tensor:
    """`corrected_loss` alone, of learners that make one update per batch: the proximal policy is the current one."""
    return corrected_loss(algorithm, current, behaviour, current.detach(), advantages, denominator)[0]


def corrected_loss(
    algorithm: Algorithm,
    current: Tensor,
    behaviour: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    denominator: float,
    staleness: int = 0,
) -> tuple[Tensor, Observed]:
    """The sum of the losses of L learners, each over its own tokens ÷ `denominator`: a scalar with gradient; and what
    the losses observe of each token [tokens of all learners].

    Logprobs are floating point [L, groups, samples, tokens], `current` with gradient; advantages [L, groups, samples],
    one per sequence; `staleness` is the age of all tokens.
    """
    if algorithm.positive_only:
        advantages = advantages.clamp(min=0.0)
    learners, groups, samples, tokens = current.shape
    count = learners * groups * samples
    batch = LossBatch(
        current=current.reshape(-1),
        behaviour=behaviour.reshape(-1),
        proximal=proximal.reshape(-1),
        advantages=advantages.unsqueeze(-1).expand(current.shape).reshape(-1),
        mask=torch.ones(count * tokens, dtype=torch.bool),
        sequence=torch.arange(count).repeat_interleave(tokens),
        staleness=torch.full((count * tokens,), staleness),
        group=torch.arange(learners * groups).repeat_interleave(samples * tokens),
    )
    if plan_of(algorithm.loss):
        pieces = [with_plan(algorithm.loss, part) for part in _split(batch, learners)]
        weights = [piece.weights for piece in pieces if piece.weights is not None]
        batch = replace(batch, weights=torch.cat(weights))
    return algorithm.loss(batch, denominator)


def _split(batch: LossBatch, parts: int) -> list[LossBatch]:
    """Equal parts of a batch, without gradient."""
    names = [field.name for field in fields(batch) if getattr(batch, field.name) is not None]
    columns = {name: getattr(batch, name).detach().chunk(parts) for name in names}
    return [LossBatch(**{"proximal": None} | {name: columns[name][part] for name in names}) for part in range(parts)]
