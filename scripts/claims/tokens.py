"""Token reversal (arXiv 2603.14608, section on sequences): a prompt of H tokens, the right answer is its reverse.

Each step the actor answers 10 prompts 10 times, the learner makes one update, with A = reward − mean of the prompt's
samples. *Frictions* (arXiv 2603.20521) are the faults between actor and learner. The paper leaves magnitudes and
details open; `Frictions` has ours. Error is measured on the learner's own policy, sampled at temperature 1, without
frictions.

A seed fixes the initial weights, prompts, draws and frictions of a run; algorithms with the same seed get the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .algorithms import ALGORITHMS, Algorithm, loss_of
from .stacks import Parameters, Past, Shape, Stack, decode, transformer
from .studies import Cell, same_algorithm

LEARNERS_AT_ONCE = 5
"""In the pass with gradient: their activations stay in the processor's cache."""
EVALUATED, GLANCED = 1024, 128
"""Evaluation answers of a learner, at the end and in between."""


@dataclass(frozen=True, slots=True)
class Task:
    """`terminal`: the reward is 1 for an answer without a mistake, else 0; otherwise the share of right tokens."""

    length: int = 10
    vocabulary: int = 2
    terminal: bool = False
    prompts: int = 10
    samples: int = 10

    @property
    def shape(self) -> Shape:
        return Shape(self.vocabulary, 2 * self.length)

    def rewards(self, prompts: Tensor, answers: Tensor) -> Tensor:
        """float32 [L, P, G] of answers [L, P, G, H] to prompts [L, P, H]."""
        right = answers == prompts.flip(-1)[:, :, None]
        return right.all(-1).float() if self.terminal else right.float().mean(-1)


@dataclass(frozen=True, slots=True)
class Frictions:
    """The faults of the actor.

    staleness   each batch is sampled by weights of k steps ago, k uniform in 0..staleness (never before the first)
    bug         with this probability an answer is all zeros, and its behaviour logprobs are reported as 0
    corruption  with this probability a reward is a fair coin's
    discovery   with this probability the answer is the right one, with the actor's own logprobs of it; beats a bug
    """

    staleness: int = 0
    bug: float = 0.0
    corruption: float = 0.0
    discovery: float = 0.0


class Draws:
    """Uniform numbers: row l [L, ...] comes from the stream of learner l's seed alone."""

    def __init__(self, seeds: Sequence[int]):
        self._streams = {seed: torch.Generator().manual_seed(1_000_003 * (seed + 1)) for seed in sorted(set(seeds))}
        places = {seed: place for place, seed in enumerate(self._streams)}
        self._rows = torch.tensor([places[seed] for seed in seeds])

    def __call__(self, *shape: int) -> Tensor:
        return torch.stack([torch.rand(shape, generator=stream) for stream in self._streams.values()])[self._rows]


# Policy


def read(parameters: Parameters, shape: Shape, prompts: Tensor) -> tuple[Tensor, Past]:
    """Reads prompts [L, P, H]: logits of the first answer token [L, P, vocabulary], keys and values for `decode`."""
    logits, past = decode(parameters, shape, prompts[:, :, None], 0, [], [])
    return logits[:, :, 0, -1], [(key.squeeze(3), value.squeeze(3)) for key, value in past]


@torch.no_grad()
def answer(
    parameters: Parameters, shape: Shape, prompts: Tensor, uniform: Tensor, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sampled answers int64 and their logprobs, both [L, P, G, H], by inverse CDF from `uniform` [L, P, G, H].

    Where `forced` [L, P, G, H] is not negative, it is taken instead of what would be sampled.
    """
    first, shared = read(parameters, shape, prompts)
    logits = first[:, :, None].expand(*uniform.shape[:3], -1)
    heads, width = shape.heads, shape.width // shape.heads
    room = (*uniform.shape[:2], heads, uniform.shape[2], uniform.shape[3], width)
    own: Past = [(torch.empty(room), torch.empty(room)) for _ in range(shape.layers)]
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    for place in range(uniform.shape[-1]):
        if place:
            found, _ = decode(parameters, shape, tokens[-1], prompts.shape[-1] + place - 1, shared, own)
            logits = found[..., -1, :]
        logits = logits.log_softmax(-1)
        below = logits.exp().cumsum(-1)[..., :-1] <= uniform[..., place, None]
        token = below.sum(-1, keepdim=True)
        if forced is not None:
            token = torch.where(forced[..., place, None] < 0, token, forced[..., place, None])
        tokens.append(token)
        logprobs.append(logits.gather(-1, token))
    return torch.cat(tokens, -1), torch.cat(logprobs, -1)


def score(parameters: Parameters, shape: Shape, prompts: Tensor, answers: Tensor) -> Tensor:
    """Logprobs [L, P, G, H] of answers [L, P, G, H] to prompts [L, P, H], with gradient."""
    first, shared = read(parameters, shape, prompts)
    later, _ = decode(parameters, shape, answers[..., :-1], prompts.shape[-1], shared, [])
    first = first[:, :, None, None].expand(*answers.shape[:3], 1, -1)
    return torch.cat([first, later], 3).log_softmax(-1).gather(-1, answers[..., None])[..., 0]


# Actors


@dataclass(slots=True)
class Rollouts:
    """prompts int64 [L, P, H], answers int64 and behaviour logprobs [L, P, G, H], advantages [L, P, G]."""

    prompts: Tensor
    answers: Tensor
    behaviour: Tensor
    advantages: Tensor


def roll_out(parameters: Parameters, task: Task, frictions: Frictions, draws: Draws) -> Rollouts:
    """One batch of actors with these weights."""
    prompts = (draws(task.prompts, task.length) * task.vocabulary).long()
    uniform = draws(task.prompts, task.samples, task.length)
    bug, discovery, corruption, coin = draws(4, task.prompts, task.samples).unbind(1)
    right = prompts.flip(-1)[:, :, None].expand(uniform.shape)
    forced = torch.where((bug < frictions.bug)[..., None], 0, -1).expand(uniform.shape)
    found = discovery < frictions.discovery
    forced = torch.where(found[..., None], right, forced)
    answers, behaviour = answer(parameters, task.shape, prompts, uniform, forced)
    broken = (bug < frictions.bug) & ~found
    behaviour = torch.where(broken[..., None], 0.0, behaviour)
    rewards = task.rewards(prompts, answers)
    rewards = torch.where(corruption < frictions.corruption, (coin < 0.5).float(), rewards)
    return Rollouts(prompts, answers, behaviour, rewards - rewards.mean(-1, keepdim=True))


class History:
    """The weights of the last `depth` + 1 steps of every learner."""

    def __init__(self, depth: int, flat: Tensor):
        self._kept = flat.new_empty(depth + 1, *flat.shape)
        self._steps = 0

    def add(self, flat: Tensor) -> None:
        self._kept[self._steps % len(self._kept)] = flat
        self._steps += 1

    def pick(self, uniform: Tensor) -> Tensor:
        """Weights of k adds ago for each learner [L, numbers], k = ⌊uniform · (depth + 1)⌋ with `uniform` [L]."""
        back = (uniform * len(self._kept)).long()
        place = (self._steps - 1 - back).clamp(min=0) % len(self._kept)
        return self._kept[place, torch.arange(len(place))]


# Training


def train(cells: Sequence[Cell], task: Task, frictions: Frictions, *, steps: int, every: int) -> list[dict[str, Any]]:
    """Each cell's `sequence_error` and `token_error` at the end, and both each `every` steps as `curve`."""
    seeds = [cell.seed for cell in cells]
    stack = Stack(transformer(seeds, task.shape), torch.tensor([cell.rate for cell in cells]))
    draws, test = Draws(seeds), Draws([seed + 500_000 for seed in seeds])
    history = History(frictions.staleness, stack.flat)
    curves: list[list[tuple[int, float, float]]] = [[] for _ in cells]
    parts = list(same_algorithm(cells, LEARNERS_AT_ONCE))
    idle = {"always"} if frictions.staleness or frictions.bug else {"always", "on_policy"}
    for step in range(1, steps + 1):
        history.add(stack.flat)
        rollouts = roll_out(stack.views(history.pick(draws(1)[:, 0])), task, frictions, draws)
        gradient = [_gradient(ALGORITHMS[name], stack, rows, rollouts, task.shape, idle) for name, rows in parts]
        stack.step(torch.cat(gradient))
        if step % every == 0 or step == steps:
            count = EVALUATED if step == steps else GLANCED
            for curve, sequence, token in zip(curves, *evaluate(stack, task, test, count), strict=True):
                curve.append((step, sequence, token))
    return [{"sequence_error": curve[-1][1], "token_error": curve[-1][2], "curve": curve} for curve in curves]


def _gradient(
    algorithm: Algorithm, stack: Stack, rows: slice, rollouts: Rollouts, shape: Shape, idle: set[str]
) -> Tensor:
    """The gradient of some learners' losses: [rows, numbers]. Algorithms in `idle` leave out groups without one."""
    prompts, answers = rollouts.prompts[rows], rollouts.answers[rows]
    behaviour, advantages = rollouts.behaviour[rows], rollouts.advantages[rows]
    denominator = float(answers[0].numel())
    if algorithm.idle in idle:
        # Each learner keeps as many groups as the one that needs most.
        equal = (advantages == 0).all(-1)
        most = int((~equal).sum(1).max())
        kept = equal.int().argsort(dim=1, stable=True)[:, :most]
        row = torch.arange(len(kept))[:, None]
        prompts, answers = prompts[row, kept], answers[row, kept]
        behaviour, advantages = behaviour[row, kept], advantages[row, kept]
    if not prompts.shape[1]:
        return torch.zeros_like(stack.flat[rows])
    leaf = stack.flat[rows].clone().requires_grad_()
    current = score(stack.views(leaf), shape, prompts, answers)
    loss_of(algorithm, current, behaviour, advantages, denominator).backward()
    assert leaf.grad is not None
    return leaf.grad


def evaluate(stack: Stack, task: Task, draws: Draws, count: int) -> tuple[list[float], list[float]]:
    """Share of wrong answers and of wrong tokens of each learner, over `count` random prompts."""
    prompts = (draws(count, task.length) * task.vocabulary).long()
    answers, _ = answer(stack.views(stack.flat), task.shape, prompts, draws(count, 1, task.length))
    wrong = answers != prompts.flip(-1)[:, :, None]
    return wrong.any(-1).float().mean((1, 2)).tolist(), wrong.float().mean((1, 2, 3)).tolist()
