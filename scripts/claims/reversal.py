"""Claims: DG's error is about 10 × lower under stale, buggy and corrupted actors (arXiv 2603.20521); with `--terminal`:
with one reward at the end of a long answer DG fails (arXiv 2604.06159, of TPO's authors).

`python -m scripts.claims.reversal [--terminal] [--quick] [--out FOLDER]`

Token reversal (arXiv 2603.14608): a prompt of H tokens of two kinds, the right answer is its reverse. Each step the
actor answers 10 prompts 10 times, the learner makes one update by Adam, with A = reward − mean of the prompt's samples.
Errors are those of the learner's policy at temperature 1. A seed fixes weights, prompts, draws and *frictions*, the
faults of the actor (magnitudes are not the paper's). H = 10; rates are tuned without frictions (used for "clean"), and
with all four at once. `--terminal`: no frictions, reward 1 for an answer without a mistake, H = 7 to 10.
"""

import argparse
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from .studies import Cell, Row, Study, argument_parser, percent_table, prepare, write

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    parser = argument_parser(__doc__, "reversal")
    parser.add_argument("--terminal", action="store_true", help="one reward at the end, by the length of the answer")
    OPTIONS = parser.parse_args()

import torch
from torch import Tensor

from .algorithms import ALGORITHMS, loss_of
from .stacks import Draws, Parameters, Shape, Stack, decode, transformer

NAMES = ("reinforce", "exact_iw", "ppo", "decoupled_ppo", "pmpo", "tpo", "dg")
RATES = (1e-4, 3e-4, 1e-3)
EVALUATED = 1024  # answers of a learner


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


CONDITIONS = {
    "clean": Frictions(),
    "all four": Frictions(staleness=30, bug=0.2, corruption=0.2, discovery=0.03),
    **{f"staleness {age}": Frictions(staleness=age) for age in (10, 30, 100)},
    **{f"bug {share}": Frictions(bug=share) for share in (0.05, 0.2, 0.5)},
    **{f"corruption {share}": Frictions(corruption=share) for share in (0.05, 0.2, 0.5)},
    **{f"discovery {share}": Frictions(discovery=share) for share in (0.01, 0.03, 0.1)},
}


@torch.no_grad()
def answer(
    parameters: Parameters, shape: Shape, prompts: Tensor, uniform: Tensor, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sampled answers int64 to prompts [L, P, H] and their logprobs, both [L, P, G, H], by inverse CDF from `uniform`
    [L, P, G, H]. A token of `forced` [L, P, G, H] that is not negative replaces the sampled one."""
    samples, drawn = uniform.shape[2], uniform.flatten(1, 2)
    logits, read = decode(parameters, shape, prompts, [])
    logits, tokens, logprobs = logits.repeat_interleave(samples, 1), list[Tensor](), list[Tensor]()
    past = [(keys.repeat_interleave(samples, 0), values.repeat_interleave(samples, 0)) for keys, values in read]
    for place in range(uniform.shape[-1]):
        if place:
            logits, past = decode(parameters, shape, tokens[-1], past)
        here = logits[..., -1, :].log_softmax(-1)
        token = (here.exp().cumsum(-1)[..., :-1] <= drawn[..., place, None]).sum(-1, keepdim=True)
        if forced is not None:
            chosen = forced.flatten(1, 2)[..., place, None]
            token = torch.where(chosen < 0, token, chosen)
        tokens.append(token)
        logprobs.append(here.gather(-1, token))
    return torch.cat(tokens, -1).view_as(uniform), torch.cat(logprobs, -1).view_as(uniform)


def score(parameters: Parameters, shape: Shape, prompts: Tensor, answers: Tensor) -> Tensor:
    """Logprobs [L, P, G, H] of answers [L, P, G, H] to prompts [L, P, H], with gradient."""
    given, asked = answers.flatten(1, 2), prompts.repeat_interleave(answers.shape[2], 1)
    logits, _ = decode(parameters, shape, torch.cat([asked, given[..., :-1]], -1), [])
    logprobs = logits[..., prompts.shape[-1] - 1 :, :].log_softmax(-1)
    return logprobs.gather(-1, given[..., None])[..., 0].view(answers.shape)


class Rollouts(NamedTuple):
    """prompts int64 [L, P, H], answers int64 and behaviour logprobs [L, P, G, H], advantages [L, P, G]."""

    prompts: Tensor
    answers: Tensor
    behaviour: Tensor
    advantages: Tensor


def roll_out(parameters: Parameters, task: Task, frictions: Frictions, draws: Draws) -> Rollouts:
    prompts = (draws(task.prompts, task.length) * task.vocabulary).long()
    uniform = draws(task.prompts, task.samples, task.length)
    bug, discovery, corruption, coin = draws(4, task.prompts, task.samples).unbind(1)
    found = (discovery < frictions.discovery)[..., None]
    broken = (bug < frictions.bug)[..., None] & ~found
    forced = torch.where(found, prompts.flip(-1)[:, :, None], torch.where(broken, 0, -1))
    answers, behaviour = answer(parameters, task.shape, prompts, uniform, forced)
    behaviour = torch.where(broken, 0.0, behaviour)
    rewards = task.rewards(prompts, answers)
    rewards = torch.where(corruption < frictions.corruption, (coin < 0.5).float(), rewards)
    return Rollouts(prompts, answers, behaviour, rewards - rewards.mean(-1, keepdim=True))


def picked(history: Sequence[Tensor], back: Tensor) -> Tensor:
    """Weights [L, numbers]: of learner l those of `back[l]` steps ago, never before the first."""
    return torch.stack([history[-1 - min(age, len(history) - 1)][row] for row, age in enumerate(back.tolist())])


def train(cells: Sequence[Cell], task: Task, frictions: Frictions, steps: int) -> list[dict[str, Any]]:
    """`sequence_error` and `token_error` of each cell at the end: shares of wrong answers and of wrong tokens."""
    seeds = [cell.seed for cell in cells]
    stack = Stack(transformer(seeds, task.shape), cells[0].rate)
    draws, test = Draws(seeds), Draws([seed + 500_000 for seed in seeds])
    history: deque[Tensor] = deque(maxlen=frictions.staleness + 1)
    for _ in range(steps):
        history.append(stack.flat.detach().clone())
        old = picked(history, (draws(1)[:, 0] * (frictions.staleness + 1)).long())
        batch = roll_out(stack.views(old), task, frictions, draws)
        current = score(stack.views(stack.flat), task.shape, batch.prompts, batch.answers)
        denominator = float(batch.answers[0].numel())
        loss = loss_of(ALGORITHMS[cells[0].algorithm], current, batch.behaviour, batch.advantages, denominator)
        stack.step(*torch.autograd.grad(loss, stack.flat))
    prompts = (test(EVALUATED, task.length) * task.vocabulary).long()
    answers, _ = answer(stack.views(stack.flat), task.shape, prompts, test(EVALUATED, 1, task.length))
    wrong = answers != prompts.flip(-1)[:, :, None]
    errors = wrong.any(-1).float().mean((1, 2)).tolist(), wrong.float().mean((1, 2, 3)).tolist()
    return [{"sequence_error": sequence, "token_error": token} for sequence, token in zip(*errors, strict=True)]


def main(options: argparse.Namespace) -> None:
    prepare()
    seeds = (1, 2) if options.quick else (2, 5)
    rows, tuned = list[Row](), None
    if options.terminal:
        lengths, steps = ((3, 4), 60) if options.quick else ((7, 8, 9, 10), 600)
        study = Study(("reinforce", "tpo", "dg"), (3e-4, 1e-3), "token_error", *seeds)
        conditions = [(f"H={length}", Task(length, terminal=True), Frictions()) for length in lengths]
    else:
        task, steps, count = (Task(3), 40, 2) if options.quick else (Task(10), 300, len(CONDITIONS))
        study = Study(NAMES, RATES, "token_error", *seeds)
        conditions = [(name, task, frictions) for name, frictions in list(CONDITIONS.items())[:count]]
    for name, task, frictions in conditions:
        found = study.run(name, partial(train, task=task, frictions=frictions, steps=steps), tuned)
        tuned = {row["algorithm"]: row["rate"] for row in found} if name == "all four" else tuned  # the last: fresh
        rows += found
    write(options.out, rows, percent_table(rows, "sequence_error"), percent_table(rows, "token_error"))


if __name__ == "__main__":
    main(OPTIONS)
