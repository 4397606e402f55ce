"""Contracts of losses and advantages (`learners.losses.contract`, `learners.advantages`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_like.config.registry import bind
from learners.advantages import Episodes, marked
from learners.losses.contract import (
    LossBatch,
    LossFunction,
    is_supervised,
    needs_proximal,
    needs_uniform,
    plan_of,
    with_plan,
)
from learners.losses.trial import try_loss

from . import Broken, Claim, Help, demand

LENGTH, TOKENS, DENOMINATOR = 6, 48, 11.0
"""Tokens of a sequence and of a batch; two sequences are a group."""


def loss_claims(spec: Mapping[str, object], help: Help) -> list[Claim]:
    loss = bind("loss", spec)
    claims: list[Claim] = [
        ("it trains: two tokens give a finite loss and a gradient", lambda: try_loss(loss, str(spec["name"]))),
        ("better answers become more likely, on-policy", lambda: _better(loss)),
        ("far off-policy the gradient stays finite", lambda: _extremes(loss)),
        ("masked tokens change nothing, whatever they hold", lambda: _masked(loss)),
        ("the cut into micro-batches changes nothing", lambda: _cuts(loss)),
        ("it is a sum ÷ denominator: twice that halves the loss", lambda: _denominator(loss)),
        ("it changes none of its inputs, and the same input gives the same bits", lambda: _pure(loss)),
    ]
    if plan_of(loss) is None:  # a plan may normalise over sequences itself
        claims.append(("shares (sequence_mean) weigh the tokens", lambda: _shares(loss)))
    return claims


def advantage_claims(spec: Mapping[str, object], help: Help) -> list[Claim]:
    advantage = bind("advantage", spec)
    claims: list[Claim] = [
        ("one finite number per sample (per trained token, if marked per_token)", lambda: _shape(advantage)),
        ("the better answer of a group gets the higher advantage", lambda: _order(advantage)),
        ("groups of one sample, and of equal rewards, stay finite", lambda: _degenerate(advantage)),
        ("it changes none of its inputs, and the same input gives the same numbers", lambda: _repeats(advantage)),
    ]
    if not marked(advantage, "needs_batch") and not marked(advantage, "needs_values"):
        claims.append(("a group by itself gets what it gets in a batch", lambda: _alone(advantage)))
    return claims


# Losses


def batch_of(loss: LossFunction, spread: float = 0.4, masked: float = 0.2) -> LossBatch:
    """Random log probabilities in float64, `spread` apart between the policies; an advantage per sequence."""
    rng = np.random.default_rng(7)
    behaviour = -rng.exponential(1.5, TOKENS)
    proximal = behaviour + rng.normal(0, spread, TOKENS)
    current = proximal + rng.normal(0, spread, TOKENS)
    sequence = torch.arange(TOKENS) // LENGTH
    return LossBatch(
        current=torch.tensor(current, requires_grad=True),
        behaviour=torch.tensor(behaviour),
        proximal=torch.tensor(proximal) if needs_proximal(loss) else None,
        advantages=torch.tensor(rng.normal(0, 1, TOKENS))[sequence],
        mask=torch.tensor(rng.random(TOKENS) >= masked),
        sequence=sequence,
        staleness=torch.tensor(rng.integers(0, 4, TOKENS)),
        group=sequence // 2,
        uniform=torch.tensor(rng.random(TOKENS)) if needs_uniform(loss) else None,
    )


def _taken(loss: LossFunction, batch: LossBatch, denominator: float = DENOMINATOR) -> tuple[Tensor, Tensor]:
    """The loss of a batch that is planned already, and its gradient."""
    value, observed = loss(batch, denominator)
    for name, values in observed.items():
        demand(values.shape == batch.mask.shape, f"{name!r} has shape {list(values.shape)}: it must be one per token")
        demand(not values.requires_grad, f"{name!r} has a gradient: detach it")
    (gradient,) = torch.autograd.grad(value, batch.current, allow_unused=True, materialize_grads=True)
    return value.detach(), gradient


def _some(batch: LossBatch, index: Tensor) -> LossBatch:
    values = {field.name: getattr(batch, field.name) for field in fields(LossBatch)}
    here: dict[str, Any] = {name: None if value is None else value[index] for name, value in values.items()}
    return LossBatch(**here)


def _close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=1e-6, atol=1e-9)


def _better(loss: LossFunction) -> None:
    batch = batch_of(loss, spread=0.0, masked=0.0)
    _, gradient = _taken(loss, with_plan(loss, batch))
    good = torch.ones_like(gradient) if is_supervised(loss) else batch.advantages
    push = float(-(gradient * good).sum())
    demand(
        push > 0, f"advantage · push = {push:.3g}: a step lowers the log probability of good answers (a wrong sign?)"
    )


def _extremes(loss: LossFunction) -> None:
    for spread in (5.0, 50.0, 400.0):
        value, gradient = _taken(loss, with_plan(loss, batch_of(loss, spread)))
        demand(
            torch.isfinite(value) and torch.isfinite(gradient).all(),
            f"with log ratios of ±{spread:g} the loss is {value.item()} and {int((~gradient.isfinite()).sum())} of "
            f"{TOKENS} gradients are not finite: use learners.losses.contract.ratio, which clamps",
        )


def _masked(loss: LossFunction) -> None:
    clean = batch_of(loss)
    value, gradient = _taken(loss, with_plan(loss, _some(clean, torch.nonzero(clean.mask)[:, 0])))
    batch = batch_of(loss)
    for name in ("behaviour", "proximal", "advantages"):
        if (held := getattr(batch, name)) is not None:
            held[~batch.mask] = torch.nan
    found, poisoned = _taken(loss, with_plan(loss, batch))
    demand(not poisoned[~batch.mask].any(), "masked tokens have a gradient: multiply or sum with masked_sum or total")
    same = _close(found, value) and (len(gradient) == len(poisoned) or _close(poisoned[batch.mask], gradient))
    demand(same, f"with NaN in masked tokens the loss is {found.item():.6g}, without them {value.item():.6g}")


def _cuts(loss: LossFunction) -> None:
    batch = with_plan(loss, replace(batch_of(loss), share=torch.rand(TOKENS, dtype=torch.float64)))
    value, gradient = _taken(loss, batch)
    total, pulls = torch.zeros((), dtype=torch.float64), torch.zeros(TOKENS, dtype=torch.float64)
    for first in (0, 2, 3, 7):
        last = {0: 2, 2: 3, 3: 7, 7: 8}[first]
        index = torch.nonzero((batch.sequence >= first) & (batch.sequence < last))[:, 0]
        piece = _some(batch, index)
        part, pull = _taken(loss, replace(piece, sequence=piece.sequence - first))
        total += part
        pulls[index] += pull
    demand(
        _close(total, value) and _close(pulls, gradient),
        f"the loss is {value.item():.6g} in one micro-batch and {total.item():.6g} in four: divide by the denominator "
        "that is passed in, and use nothing but the tokens of one sequence at a time (or make a Plan)",
    )


def _denominator(loss: LossFunction) -> None:
    batch = with_plan(loss, batch_of(loss))
    once, twice = _taken(loss, batch)[1], _taken(loss, batch, 2 * DENOMINATOR)[1]
    demand(_close(2 * twice, once), "the gradient does not halve: do not divide by anything else (no .mean())")


def _shares(loss: LossFunction) -> None:
    plain = batch_of(loss)
    halves = replace(plain, share=torch.full((TOKENS,), 0.5, dtype=torch.float64))
    once, half = _taken(loss, with_plan(loss, plain))[1], _taken(loss, with_plan(loss, halves))[1]
    demand(
        _close(2 * half, once),
        "with shares of ½ the gradient is not half: sum with learners.losses.contract.total, or multiply by shares()",
    )


def _pure(loss: LossFunction) -> None:
    batch = with_plan(loss, batch_of(loss))
    kept = {f.name: held.clone() for f in fields(batch) if (held := getattr(batch, f.name)) is not None}
    first, second = _taken(loss, batch), _taken(loss, batch)
    changed = [name for name, held in kept.items() if not torch.equal(getattr(batch, name), held)]
    demand(not changed, f"it wrote into batch.{', batch.'.join(changed)}: it must not")
    demand(
        torch.equal(first[0], second[0]) and torch.equal(first[1], second[1]),
        "two calls differ: a loss that draws takes batch.uniform (mark it with wants_uniform)",
    )


# Advantages

REWARDS = np.array([1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.0, 0.25])
GROUPS = np.array([0, 0, 0, 0, 1, 1, 1, 1])
Advantage = Callable[..., np.ndarray]


def _called(advantage: Advantage, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """One number per sample, or per token: two of each sample."""
    if not marked(advantage, "per_token"):
        return advantage(rewards, groups)
    sample = np.repeat(np.arange(len(rewards)), 2)
    values = np.zeros(len(sample)) if marked(advantage, "needs_values") else None
    teacher = (rewards[sample], np.zeros(len(sample))) if marked(advantage, "needs_teacher") else (None, None)
    return advantage(Episodes(rewards, groups, sample, np.zeros(len(sample)), values, None, None, *teacher))


def _count(advantage: Advantage, samples: int) -> int:
    return samples * 2 if marked(advantage, "per_token") else samples


def _shape(advantage: Advantage) -> None:
    found = np.asarray(_called(advantage, REWARDS, GROUPS))
    wanted = _count(advantage, len(REWARDS))
    demand(found.shape == (wanted,), f"it returned shape {list(found.shape)} for {wanted} of them")
    demand(np.isfinite(found).all(), f"it returned {found.tolist()}")


def _order(advantage: Advantage) -> None:
    rewards, groups = np.array([1.0, 0.0, 0.0, 0.0]), np.zeros(4, np.int64)
    found = _called(advantage, rewards, groups)
    per = _count(advantage, 1)
    demand(found[:per].sum() > found[per : 2 * per].sum(), f"rewards 1, 0, 0, 0 of a group gave {found.tolist()}")


def _degenerate(advantage: Advantage) -> None:
    for rewards, groups in (([0.5], [3]), ([1.0, 1.0], [0, 0]), ([0.0, 0.0, 0.0], [0, 0, 1]), ([], [])):
        found = np.asarray(_called(advantage, np.array(rewards), np.array(groups, np.int64)))
        demand(np.isfinite(found).all(), f"rewards {rewards} of groups {groups} gave {found.tolist()} (÷ 0?)")


def _repeats(advantage: Advantage) -> None:
    rewards, groups = REWARDS.copy(), GROUPS.copy()
    first, second = _called(advantage, rewards, groups), _called(advantage, rewards, groups)
    unchanged = np.array_equal(rewards, REWARDS) and np.array_equal(groups, GROUPS)
    demand(unchanged, "it wrote into its inputs: it must not")
    demand(np.array_equal(first, second), "two calls with the same rewards differ")


def _alone(advantage: Advantage) -> None:
    whole = _called(advantage, REWARDS, GROUPS)
    parts = [_called(advantage, REWARDS[where], GROUPS[where]) for where in (slice(0, 4), slice(4, 8))]
    if not np.allclose(np.concatenate(parts), whole):
        raise Broken("it compares groups with one another: mark it with learners.advantages.needs_batch")


CLAIMS = {"loss": loss_claims, "advantage": advantage_claims}
