"""Learners whose actors are stale, inexact, or both: the loop of the studies off policy.

Token reversal by a small network (`gated`), 6 prompts × 6 answers per step, or sums by a pretrained model
(`arithmetic`); two optimizer steps per batch as the learner does, A = reward − mean of the prompt's samples, an entropy
bonus. Rewards are those of the learner's own exact policy, sampled at temperature 1. All learners with one seed begin
alike and get the same prompts and draws.

Losses and corrections are those of `learners.losses`, spelled as a config spells them. Quantisation is the engine's
(`actors.engines.inexact`).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from actors.engines.inexact import quantised
from areal_like.config.registry import bind
from learners.losses.contract import needs_proximal, plan_of

from .algorithms import Algorithm, corrected_loss
from .gated import Gated
from .stacks import Parameters, Stack
from .studies import Cell, same_algorithm
from .tokens import Draws, History, Rollouts, Task

LAGGING = Task(length=6, vocabulary=4, prompts=6, samples=6)
MINIBATCHES = 2
EVALUATED, GLANCED = 512, 64
"""Held-out answers of a learner, at the end and in between."""
SIGNS = (
    "kl",
    "ess",
    "chi2",
    "sequence_ess",
    "sequence_chi2",
    "ratio_max",
    "entropy",
    "cosine",
    "grad_norm",
    "rejected",
)
"""What a learner can see of itself, each the mean over some steps: k3 of behaviour against its policy at the start of
the step, effective sample size and χ² of the tokens' and the sequences' weights, the largest ratio, the entropy per
token, the cosine of consecutive gradients, their norm, and the share of rejected tokens."""


class Policy(Protocol):
    """What is trained; the methods are those of `gated`. `embeddings`: matrices whose rows are looked up. `at_once`:
    learners side by side. `acting`: what else an inexact actor's parameters hold, of layers that are not trained."""

    @property
    def embeddings(self) -> tuple[str, ...]: ...

    @property
    def at_once(self) -> int: ...

    def start(self, seeds: Sequence[int], task: Task) -> dict[str, Tensor]: ...

    def acting(self, how: str | float | None) -> Parameters: ...

    def distributions(self, parameters: Parameters, prompts: Tensor, answers: Tensor) -> Tensor: ...

    def roll_out(
        self, parameters: Parameters, task: Task, draws: Any, bug: float, *, silent: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

    def held_out(self, parameters: Parameters, task: Task, draws: Any, count: int) -> list[float]: ...


GATED = Gated()


@dataclass(frozen=True, slots=True)
class Method:
    """A loss as a config says it, and the weight of the entropy (nats per token)."""

    loss: Mapping[str, Any]
    bonus: float = 0.02


@dataclass(frozen=True, slots=True)
class Actor:
    """`staleness`: every batch is exactly so many versions old (fewer in the first steps). `mismatch`: None, int8 |
    int4 | fp8, or the size of Gaussian noise, relative to each matrix's root mean square; drawn anew for each version,
    or once if it `stays`. `bug`: as `tokens.Frictions` has it; if `silent`, a broken actor reports its own logprobs of
    what it says."""

    staleness: int = 0
    mismatch: str | float | None = None
    bug: float = 0.0
    stays: bool = False
    silent: bool = False


def train(
    cells: Sequence[Cell],
    methods: Mapping[str, Method],
    actor: Actor,
    *,
    steps: int,
    every: int,
    task: Task = LAGGING,
    policy: Policy = GATED,
) -> list[dict[str, Any]]:
    """Each cell's held-out `reward` at the end, its largest on the way (`best`), the `mean` over the run, its `error`
    (1 − reward), and `curve`: each `every` steps the step, the held-out reward, the batch's reward and `SIGNS`."""
    found: list[dict[str, Any]] = []
    for some in (cells[start : start + policy.at_once] for start in range(0, len(cells), policy.at_once)):
        for curve in _train(some, methods, actor, steps, every, task, policy):
            rewards = [entry[1] for entry in curve]
            summary = {"reward": rewards[-1], "best": max(rewards), "mean": sum(rewards) / len(rewards)}
            found.append(summary | {"error": 1.0 - rewards[-1], "curve": curve})
    return found


def _train(
    cells: Sequence[Cell],
    methods: Mapping[str, Method],
    actor: Actor,
    steps: int,
    every: int,
    task: Task,
    policy: Policy,
) -> list[list[tuple[float, ...]]]:
    seeds = [cell.seed for cell in cells]
    stack = Stack(policy.start(seeds, task), torch.tensor([cell.rate for cell in cells]))
    draws, test = Draws(seeds), Draws([seed + 500_000 for seed in seeds])
    history, latest = History(actor.staleness, stack.flat), torch.full((len(cells),), 1.0 - 1e-6)
    update = Update(stack, [(methods[name], rows) for name, rows in same_algorithm(cells)], actor, policy)
    curves: list[list[tuple[float, ...]]] = [[] for _ in cells]
    seen: list[Tensor] = []
    for step in range(1, steps + 1):
        history.add(stack.flat)
        version = 0 if actor.stays else max(0, step - 1 - actor.staleness)
        acting = inexact(stack.views(history.pick(latest)), actor.mismatch, seeds, version, policy.embeddings)
        acting = {**acting, **policy.acting(actor.mismatch)}
        prompts, answers, behaviour, earned = policy.roll_out(acting, task, draws, actor.bug, silent=actor.silent)
        rollouts = Rollouts(prompts, answers, behaviour, earned - earned.mean(-1, keepdim=True))
        seen.append(torch.cat([earned.mean((1, 2))[None], update(rollouts)]))
        if step % every == 0 or step == steps:
            count = EVALUATED if step == steps else GLANCED
            rewards = policy.held_out(stack.views(stack.flat), task, test, count)
            means = torch.stack(seen).nanmean(0).T.tolist()
            seen.clear()
            for curve, reward, mean in zip(curves, rewards, means, strict=True):
                curve.append((step, reward, *mean))
    return curves


def inexact(
    exact: Parameters, how: str | float | None, seeds: Sequence[int], version: int, embeddings: Sequence[str]
) -> Parameters:
    """What actors of these learners sample from, [L, ...] each: matrices by `how`, one scale for each output and for
    each row of an embedding."""
    if how is None:
        return exact
    if isinstance(how, str):
        return {name: _rounded(values, how, embeds=name in embeddings) for name, values in exact.items()}
    return {name: _noisy(values, name, how, seeds, version) for name, values in exact.items()}


def _rounded(values: Tensor, form: str, *, embeds: bool) -> Tensor:
    rows = values if embeds else values.transpose(1, 2)
    rounded = quantised(rows.flatten(0, 1), form).view(rows.shape)
    return rounded if embeds else rounded.transpose(1, 2).contiguous()


def _noisy(values: Tensor, name: str, sigma: float, seeds: Sequence[int], version: int) -> Tensor:
    @functools.cache
    def noise(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{version}/{seed}".encode()))
        return torch.randn(values.shape[1:], generator=generator)

    size = values.square().mean((1, 2), keepdim=True).sqrt()
    return values + sigma * size * torch.stack([noise(seed) for seed in seeds])


def passes(method: Method) -> int:
    """What a train step costs with this loss, in forward passes over the batch: one with gradient and its backward pass
    (two more), one for the proximal policy, one for a plan that must see the current one."""
    loss = bind("loss", method.loss)
    plan = plan_of(loss)
    return 3 + needs_proximal(loss) + bool(plan and plan.needs_current)


class Update:
    """The train step of some learners, each method's beside each other: two minibatches of whole groups."""

    def __init__(self, stack: Stack, methods: Sequence[tuple[Method, slice]], actor: Actor, policy: Policy = GATED):
        self.stack, self.age, self.policy = stack, actor.staleness, policy
        self.parts = [(Algorithm(bind("loss", method.loss)), method.bonus, rows) for method, rows in methods]
        self._before: Tensor | None = None

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """Train once; returns `SIGNS` [SIGNS, L]."""
        with torch.no_grad():
            known = self.policy.distributions(self.stack.views(self.stack.flat), rollouts.prompts, rollouts.answers)
            proximal = known.gather(-1, rollouts.answers[..., None])[..., 0]
            entropy = -(known.exp() * known).sum(-1).flatten(1).mean(1)
        parts = []
        for groups in torch.arange(rollouts.prompts.shape[1]).chunk(MINIBATCHES):
            gradient, rejected = self._gradient(rollouts, proximal, groups)
            parts.append(torch.stack([self._cosine(gradient), gradient.norm(dim=1), rejected]))
            self.stack.step(gradient)
        cosine, norm, rejected = torch.stack(parts).nanmean(0)
        return torch.stack([*drift(rollouts.behaviour, proximal), entropy, cosine, norm, rejected])

    def _gradient(self, rollouts: Rollouts, proximal: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Of each learner's loss [L, numbers], and the share of tokens that its correction or mask rejects [L]."""
        leaf = self.stack.flat.clone().requires_grad_()
        prompts, answers = rollouts.prompts[:, groups], rollouts.answers[:, groups]
        each = self.policy.distributions(self.stack.views(leaf), prompts, answers)
        current, tokens = each.gather(-1, answers[..., None])[..., 0], float(answers[0].numel())
        entropies = -(each.exp() * each).sum((1, 2, 3, 4)) / tokens
        policies = current, rollouts.behaviour[:, groups], proximal[:, groups], rollouts.advantages[:, groups]
        total, rejected = torch.zeros(()), torch.zeros(current.shape)
        for algorithm, bonus, rows in self.parts:
            now, acted, before, gained = (columns[rows] for columns in policies)
            loss, observed = corrected_loss(algorithm, now, acted, before, gained, tokens, self.age)
            total = total + loss - bonus * entropies[rows].sum()
            if "masked_share" in observed:
                rejected[rows] = observed["masked_share"].float().view(rejected[rows].shape)
        total.backward()
        assert leaf.grad is not None
        return leaf.grad, rejected.flatten(1).mean(1)

    def _cosine(self, gradient: Tensor) -> Tensor:
        """With the gradient before [L]; NaN at first."""
        before, self._before = self._before, gradient
        if before is None:
            return torch.full((len(gradient),), torch.nan)
        return torch.cosine_similarity(gradient, before, dim=1)


def drift(behaviour: Tensor, proximal: Tensor) -> list[Tensor]:
    """The first six of `SIGNS`, [L] each, as `learners.diagnostics` defines them; logprobs [L, P, G, H]."""
    moved = (proximal - behaviour).clamp(-20.0, 20.0)
    whole = moved.sum(-1).clamp(-20.0, 20.0)
    found = [(moved.expm1() - moved).flatten(1).mean(1)]
    for logs in (moved, whole):
        weights = logs.double().exp().flatten(1)
        squares = weights.square().mean(1)
        found += [(weights.mean(1).square() / squares).float(), (squares - 1.0).float()]
    return [*found, moved.flatten(1).amax(1).exp()]
