"""The contract of losses (`learners.losses.contract`), as checks on made-up input."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learners.losses.contract import LossBatch, LossFunction, marks_of, planned_for
from learners.losses.trial import try_loss

from . import demand

LENGTH, TOKENS, DENOMINATOR = 6, 48, 11.0
"""Tokens of a sequence and of a batch; two sequences are a group."""


def claims(loss: LossFunction, name: str) -> dict[str, Callable[[], None]]:
    checks = {
        "better answers become more likely, on-policy": _better,
        "far off-policy the gradient stays finite": _extremes,
        "masked tokens change nothing, whatever they hold": _masked,
        "it is a sum ÷ denominator, weighed by shares: the cut into micro-batches changes nothing": _cuts,
        "it changes none of its inputs, and the same input gives the same bits": _pure,
    }
    trains: dict[str, Callable[[], None]] = {
        "it trains: two tokens give a finite loss and a gradient": partial(try_loss, loss, name)
    }
    return trains | {claim: partial(check, loss) for claim, check in checks.items()}


def batch_of(spread: float = 0.4, masked: float = 0.2) -> LossBatch:
    """Random log probabilities in float64, `spread` apart between the policies; an advantage per sequence."""
    rng, sequence = np.random.default_rng(7), torch.arange(TOKENS) // LENGTH
    steps = -rng.exponential(1.5, TOKENS), *rng.normal(0, spread, (2, TOKENS))
    behaviour, proximal, current = (torch.tensor(each) for each in np.cumsum(steps, axis=0))
    advantages, mask = torch.tensor(rng.normal(0, 1, TOKENS))[sequence], torch.tensor(rng.random(TOKENS) >= masked)
    staleness = torch.tensor(rng.integers(0, 4, TOKENS))
    made = LossBatch(current.requires_grad_(), behaviour, proximal, advantages, mask, sequence, staleness)
    return replace(made, group=sequence // 2)


def _taken(loss: LossFunction, batch: LossBatch) -> tuple[Tensor, Tensor]:
    """The loss of a planned batch, and its gradient."""
    value, observed = loss(batch, DENOMINATOR)
    for name, values in observed.items():
        demand(values.shape == batch.mask.shape, f"{name!r}: got shape {list(values.shape)}, expected one per token")
        demand(not values.requires_grad, f"{name!r} has a gradient: detach it")
    (gradient,) = torch.autograd.grad(value, batch.current, allow_unused=True, materialize_grads=True)
    return value.detach(), gradient


def _planned(loss: LossFunction, batch: LossBatch) -> tuple[Tensor, Tensor]:
    return _taken(loss, planned_for(loss, batch)[0])


def _columns(batch: LossBatch) -> dict[str, Any]:
    return {each.name: held for each in fields(batch) if (held := getattr(batch, each.name)) is not None}


def _some(batch: LossBatch, index: Tensor) -> LossBatch:
    return LossBatch(**{name: held[index] for name, held in _columns(batch).items()})


def _better(loss: LossFunction) -> None:
    batch = batch_of(spread=0.0, masked=0.0)
    _, gradient = _planned(loss, batch)
    push = float(-(gradient * batch.advantages).sum())
    demand(push > 0, f"advantage · push = {push:.3g}: a step makes good answers less likely (a wrong sign?)")


def _extremes(loss: LossFunction) -> None:
    for spread in (5.0, 50.0, 400.0):
        finite = all(torch.isfinite(each).all() for each in _planned(loss, batch_of(spread)))
        demand(finite, f"not with log ratios of ±{spread:g}: use learners.losses.contract.ratio, which clamps")


def _masked(loss: LossFunction) -> None:
    batch = batch_of()
    value, gradient = _planned(loss, _some(batch, batch.mask))
    for held in (batch.behaviour, batch.proximal, batch.advantages):
        if held is not None:
            held[~batch.mask] = torch.nan
    found, poisoned = _planned(loss, batch)
    demand(not poisoned[~batch.mask].any(), "masked tokens have a gradient: sum with learners.losses.contract.total")
    same = torch.allclose(found, value) and torch.allclose(poisoned[batch.mask], gradient)
    demand(same, f"with NaN in masked tokens the loss is {found.item():.6g}, without them {value.item():.6g}")


def _cuts(loss: LossFunction) -> None:
    batch, _ = planned_for(loss, replace(batch_of(), share=torch.full((TOKENS,), 0.5, dtype=torch.float64)))
    value, gradient = _taken(loss, batch)
    total, pulls = 0.0, torch.zeros(TOKENS, dtype=torch.float64)
    for first, last in ((0, 2), (2, 3), (3, 7), (7, 8)):
        piece = _some(batch, (batch.sequence >= first) & (batch.sequence < last))
        part, pulls[first * LENGTH : last * LENGTH] = _taken(loss, replace(piece, sequence=piece.sequence - first))
        total += part.item()
    demand(
        np.isclose(total, value.item()) and torch.allclose(pulls, gradient),
        f"the loss is {value.item():.6g} in one micro-batch and {total:.6g} in four: divide by the denominator "
        "that is passed in (no .mean()), and use only the tokens of one sequence at a time (or make a plan)",
    )
    same = marks_of(loss).plan or torch.allclose(2 * gradient, _planned(loss, batch_of())[1])  # a plan may normalise
    demand(same, "with shares of ½ the gradient is not half: sum with learners.losses.contract.total")


def _pure(loss: LossFunction) -> None:
    batch, _ = planned_for(loss, batch_of())
    kept = {name: held.clone() for name, held in _columns(batch).items()}
    first, second = _taken(loss, batch), _taken(loss, batch)
    changed = [name for name, held in kept.items() if not torch.equal(getattr(batch, name), held)]
    demand(not changed, f"it wrote into batch.{', batch.'.join(changed)}")
    same = all(map(torch.equal, first, second))
    demand(same, "two calls differ: a loss must not draw")
