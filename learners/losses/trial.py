"""Calls a loss once on two tokens before a run begins, since some mistakes would otherwise appear late or never.

An entropy bonus or a KL term moves the weights even if the policy loss gives no gradient; such a run looks healthy but
learns nothing from its rewards.
"""

from __future__ import annotations

from bdb import BdbQuit
from typing import Any

import torch
from torch import Tensor

from areal_like.errors import UserError
from learners.losses.contract import LossBatch, LossFunction, needs_proximal, needs_uniform, with_plan

TOKENS = 2


class BadLoss(UserError):
    """A loss that cannot train anything."""


def try_loss(loss: LossFunction, name: str) -> None:
    """Raises BadLoss unless the loss, whose knobs are bound, returns a finite number with a finite gradient that is not
    zero on a batch of two tokens, one better than its baseline and one worse, and one observed number per token."""
    batch = _batch(loss)
    try:
        returned = loss(with_plan(loss, batch), float(TOKENS))
    except BdbQuit:
        raise
    except Exception as error:
        raise BadLoss(f"loss {name} fails on a batch of two tokens: {type(error).__name__}: {error}") from error
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise BadLoss(f"loss {name} returned {_shown(returned)}: it must be (loss, observed)")
    value, observed = returned
    _check_value(name, value, batch.current)
    _check_observed(name, observed)


def _check_value(name: str, value: Any, current: Tensor) -> None:
    if not isinstance(value, Tensor) or value.shape != ():
        raise BadLoss(f"loss {name} returned {_shown(value)}: it must be a tensor without axes, one number")
    if not torch.isfinite(value):
        raise BadLoss(f"loss {name} is {value.item()} on a batch of two ordinary tokens")
    gradient = torch.autograd.grad(value, current, allow_unused=True)[0] if value.requires_grad else None
    if gradient is None or not gradient.any():
        raise BadLoss(
            f"loss {name} gives no gradient to batch.current, the logprobs of the policy, on two tokens with the "
            "advantages 1 and -1: the loss would ignore the rewards; look for a `.detach()`"
        )
    if not torch.isfinite(gradient).all():
        raise BadLoss(f"loss {name} has the gradient {gradient.tolist()} on a batch of two ordinary tokens")


def _check_observed(name: str, observed: Any) -> None:
    if not isinstance(observed, dict):
        raise BadLoss(f"loss {name}: what it observes must be a dict, got {_shown(observed)}")
    for key, values in observed.items():
        if not isinstance(key, str) or not isinstance(values, Tensor) or values.shape != (TOKENS,):
            raise BadLoss(f"loss {name}: {key!r} must be a tensor with one number per token, got {_shown(values)}")


def _shown(thing: Any) -> str:
    return f"a tensor of shape {list(thing.shape)}" if isinstance(thing, Tensor) else f"{type(thing).__name__}"


def _batch(loss: LossFunction) -> LossBatch:
    """Two answers of a token each to one prompt, by the current policy itself: nothing is clipped."""
    current = torch.tensor([-0.7, -1.2], requires_grad=True)
    return LossBatch(
        current=current,
        behaviour=current.detach().clone(),
        proximal=current.detach().clone() if needs_proximal(loss) else None,
        advantages=torch.tensor([1.0, -1.0]),
        mask=torch.ones(TOKENS, dtype=torch.bool),
        sequence=torch.arange(TOKENS),
        staleness=torch.zeros(TOKENS, dtype=torch.int64),
        group=torch.zeros(TOKENS, dtype=torch.int64),
        uniform=torch.tensor([0.25, 0.75]) if needs_uniform(loss) else None,
    )
