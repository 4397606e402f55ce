"""Calls a loss once on two tokens before a run begins: one without a gradient would otherwise be found late or never,
since an entropy bonus or a KL term moves the weights in any case."""

from bdb import BdbQuit
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from areal_like.errors import UserError
from learners.losses.contract import LossBatch, LossFunction, planned_for


class BadLoss(UserError):
    """A loss that cannot train anything."""


def try_loss(loss: LossFunction, name: str) -> None:
    """Raises BadLoss unless the loss, whose knobs are bound, returns a finite number with a finite gradient that is not
    zero on a batch of two tokens, one better than its baseline and one worse, and one observed number per token."""
    logprobs, one = torch.tensor([-0.7, -1.2]), torch.tensor([0, 1])
    current, mask = logprobs.clone().requires_grad_(), torch.ones(2, dtype=torch.bool)
    batch = LossBatch(current, logprobs, logprobs, torch.tensor([1.0, -1.0]), mask, one, 0 * one)
    batch.group = 0 * one
    try:
        returned = loss(planned_for(loss, batch)[0], 2.0)
    except BdbQuit:
        raise
    except Exception as error:
        raise BadLoss(f"loss {name} fails on a batch of two tokens: {type(error).__name__}: {error}") from error
    for problem in _problems(returned, current):
        raise BadLoss(f"loss {name}: {problem}")


def _problems(returned: Any, current: Tensor) -> Iterator[str]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        yield f"got {_shown(returned)}, expected (loss, observed)"
    value, observed = returned
    if not isinstance(value, Tensor) or value.shape != ():
        yield f"got {_shown(value)}, expected a tensor without axes, one number"
    if not torch.isfinite(value):
        yield f"got {value.item()}, expected a finite number"
    gradient = torch.autograd.grad(value, current, allow_unused=True)[0] if value.requires_grad else None
    if gradient is None or not gradient.any():
        yield "it gives no gradient to batch.current, so it would ignore the rewards: look for a `.detach()`"
    elif not torch.isfinite(gradient).all():
        yield f"got the gradient {gradient.tolist()}, expected finite numbers"
    if not isinstance(observed, dict):
        yield f"observed: got {_shown(observed)}, expected a dict"
    for key, values in observed.items():
        if not isinstance(key, str) or not isinstance(values, Tensor) or values.shape != (2,):
            yield f"observed {key!r}: got {_shown(values)}, expected a tensor with one number per token"


def _shown(thing: Any) -> str:
    return f"a tensor of shape {list(thing.shape)}" if isinstance(thing, Tensor) else type(thing).__name__
