"""A policy of a few thousand numbers for token reversal, cheap enough for thousands of learners on one processor.

Logits of the token at a place: `relu((prompts + last) · gates) outputs`, where `prompts` maps the whole prompt, `last`
the token before, and `gates` scales each hidden unit by place. So it has to learn which token of the prompt each place
takes, and it is autoregressive. Rows of all tensors are learners, as in `stacks`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .stacks import Parameters
from .tokens import Task

HIDDEN = 32
EMBEDDINGS = ("last", "gates")
"""Matrices whose rows are looked up."""


def gated(seeds: Sequence[int], task: Task) -> dict[str, Tensor]:
    """Parameters of learners with these seeds; the first policy is close to uniform."""
    shapes: dict[str, tuple[tuple[int, int], float]] = {
        "prompts": ((task.length * task.vocabulary, HIDDEN), 1 / math.sqrt(task.length)),
        "last": ((task.vocabulary, HIDDEN), 0.1),
        "gates": ((task.length, HIDDEN), 1.0),
        "outputs": ((HIDDEN, task.vocabulary), 0.1),
    }
    made: dict[str, list[Tensor]] = {name: [] for name in shapes}
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for name, (shape, deviation) in shapes.items():
            made[name].append(torch.randn(shape, generator=generator) * deviation)
    return {name: torch.stack(values) for name, values in made.items()}


def distributions(parameters: Parameters, prompts: Tensor, answers: Tensor) -> Tensor:
    """Logprobs of every token at each place [L, P, G, H, vocabulary], with gradient, of answers [L, P, G, H] to prompts
    [L, P, H]."""
    learners, count = answers.shape[0], parameters["last"].shape[1]
    known = _known(parameters, prompts)[:, :, None, None]
    before = torch.bmm(_one_hot(answers[..., :-1].flatten(1), count), parameters["last"])
    before = F.pad(before.view(*answers.shape[:3], -1, HIDDEN), (0, 0, 1, 0))
    hidden = F.relu((known + before) * parameters["gates"][:, None, None])
    return _logprobs(parameters, hidden.view(learners, -1, HIDDEN)).view(*answers.shape, -1)


def _logprobs(parameters: Parameters, hidden: Tensor) -> Tensor:
    """Of hidden units [L, N, HIDDEN]: [L, N, vocabulary]. Computed with N last: a softmax of four is fast only so."""
    logits = torch.bmm(parameters["outputs"].transpose(1, 2), hidden.transpose(1, 2))
    return logits.log_softmax(1).transpose(1, 2)


def _known(parameters: Parameters, prompts: Tensor) -> Tensor:
    """What the prompts [L, P, H] say to each hidden unit [L, P, HIDDEN]."""
    vocabulary = parameters["last"].shape[1]
    return torch.bmm(_one_hot(prompts, vocabulary).flatten(2), parameters["prompts"])


def _one_hot(tokens: Tensor, count: int) -> Tensor:
    return F.one_hot(tokens, count).float()


@torch.no_grad()
def answer(parameters: Parameters, prompts: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sampled answers int64 and their logprobs, both [L, P, G, H], by inverse CDF from `uniform` [L, P, G, H]."""
    known = _known(parameters, prompts)[:, :, None]
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    for place in range(uniform.shape[-1]):
        drive = known.expand(*uniform.shape[:3], -1)
        if place:
            last = torch.bmm(_one_hot(tokens[-1].flatten(1), parameters["last"].shape[1]), parameters["last"])
            drive = known + last.view(drive.shape)
        hidden = F.relu(drive * parameters["gates"][:, place, None, None])
        each = _logprobs(parameters, hidden.flatten(1, 2)).view(*uniform.shape[:3], -1)
        token = (each.exp().cumsum(-1)[..., :-1] <= uniform[..., place, None]).sum(-1, keepdim=True)
        tokens.append(token)
        logprobs.append(each.gather(-1, token))
    return torch.cat(tokens, -1), torch.cat(logprobs, -1)


@torch.no_grad()
def roll_out(
    parameters: Parameters, task: Task, draws: Any, bug: float, *, silent: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prompts [L, P, H], answers, behaviour logprobs [L, P, G, H] and rewards [L, P, G] of one batch. With probability
    `bug` an answer is all zeros, and its logprobs are reported as 0, or if `silent` as the policy's own."""
    prompts = (draws(task.prompts, task.length) * task.vocabulary).long()
    uniform, broken = draws(task.prompts, task.samples, task.length), draws(task.prompts, task.samples)
    answers, behaviour = answer(parameters, prompts, uniform)
    if bug:
        hit = (broken < bug)[..., None]
        answers, behaviour = answers.masked_fill(hit, 0), behaviour.masked_fill(hit, 0.0)
        if silent:
            own = distributions(parameters, prompts, answers).gather(-1, answers[..., None])[..., 0]
            behaviour = torch.where(hit, own, behaviour)
    return prompts, answers, behaviour, task.rewards(prompts, answers)


class Gated:
    """This policy as `lagging` trains it. All that inexact actors sample from is in their parameters."""

    embeddings, at_once = EMBEDDINGS, 120
    start = staticmethod(gated)
    distributions = staticmethod(distributions)
    roll_out = staticmethod(roll_out)

    def acting(self, how: str | float | None) -> Parameters:
        return {}

    def held_out(self, parameters: Parameters, task: Task, draws: Any, count: int) -> list[float]:
        return held_out(parameters, task, draws, count)


def held_out(parameters: Parameters, task: Task, draws: Any, count: int) -> list[float]:
    """Each learner's share of right tokens in `count` answers, sampled at temperature 1."""
    prompts = (draws(count, task.length) * task.vocabulary).long()
    answers, _ = answer(parameters, prompts, draws(count, 1, task.length))
    return task.rewards(prompts, answers).mean((1, 2)).tolist()
