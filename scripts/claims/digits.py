"""Claims: DG tolerates a stale actor, REINFORCE and exact importance weights do not (arXiv 2603.20521); the backward
passes of 3 % of the samples are enough (`dg_kondo`, arXiv 2603.20526).

`python -m scripts.claims.digits [--quick] [--out FOLDER]`

The papers' MNIST bandit on scikit-learn's `load_digits` (897 images train, 450 tune, 450 test): name the digit, reward
1 if it is right. A perceptron 64-50-50-10, A = reward − Σ_a π(a)², 100 images per batch, Adam, 10,000 steps. Actors'
weights are D steps old. Error: share of wrongly named images. `backward_share`: of samples with a gradient.
"""

import argparse
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from .studies import Cell, Row, Study, argument_parser, percent_table, prepare, write

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    OPTIONS = argument_parser(__doc__, "digits").parse_args()

import torch
from torch import Tensor

from .algorithms import ALGORITHMS, Loss, loss_of
from .stacks import Draws, Parameters, Stack, perceive, perceptron

SIZES = (64, 50, 50, 10)
BATCH = 100
DELAYS = (0, 10, 100, 300, 1000)
NAMES = ("reinforce", "exact_iw", "ppo", "positive_only", "dg", "dg_kondo")
RATES = (3e-4, 1e-3, 3e-3)
Images = tuple[Tensor, Tensor]
"""Pixels float32 [64, N] in [0, 1], and digits int64 [N]."""
Actions = tuple[Tensor, Tensor, Tensor]
"""One batch of actors: places of the images, actions (both int64) and behaviour logprobs, each [L, 100]."""


def load() -> dict[str, Images]:
    """Images of "train", "tune" and "test": a fixed split, with equal shares of each digit."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, digits = load_digits(return_X_y=True)
    rest, test = train_test_split(range(len(digits)), test_size=450, random_state=0, stratify=digits)
    train, tune = train_test_split(rest, test_size=450, random_state=0, stratify=digits[rest])
    parts = {"train": train, "tune": tune, "test": test}
    values, right = torch.tensor(pixels.T / 16, dtype=torch.float32), torch.tensor(digits)
    return {name: (values[:, places], right[places]) for name, places in parts.items()}


@torch.no_grad()
def act(stack: Stack, images: Images, draws: Draws) -> Actions:
    places = (draws(BATCH) * len(images[1])).long()
    logprobs = _logprobs(stack.views(stack.flat), images, places)
    actions = (logprobs.exp().cumsum(1)[:, :-1] <= draws(BATCH)[:, None]).sum(1)
    return places, actions, logprobs.gather(1, actions[:, None])[:, 0]


def _logprobs(parameters: Parameters, images: Images, places: Tensor) -> Tensor:
    """[L, 10, N] of the images at `places` [L, N]."""
    return perceive(parameters, images[0].T[places].transpose(1, 2)).log_softmax(1)


def train(cells: Sequence[Cell], delay: int, steps: int, data: dict[str, Images]) -> list[dict[str, Any]]:
    """Each cell's `tune_error`, `test_error` and `backward_share`."""
    seeds = [cell.seed for cell in cells]
    stack = Stack(perceptron(seeds, SIZES), cells[0].rate)
    draws, loss = Draws(seeds), ALGORITHMS[cells[0].algorithm]
    # A batch of weights that are D steps old is the one that was sampled D steps ago.
    waiting = deque(act(stack, data["train"], draws) for _ in range(delay))
    backward = torch.zeros(len(cells))
    for _ in range(steps):
        waiting.append(act(stack, data["train"], draws))
        gradient, used = _gradient(stack, loss, data["train"], waiting.popleft())
        stack.step(gradient)
        backward += used / steps
    numbers = {"backward_share": backward.tolist()}
    for name in ("tune", "test"):
        pixels, digits = data[name]
        logits = perceive(stack.views(stack.flat), pixels.expand(len(cells), -1, -1))
        numbers[f"{name}_error"] = (logits.argmax(1) != digits).float().mean(-1).tolist()
    return [dict(zip(numbers, values, strict=True)) for values in zip(*numbers.values(), strict=True)]


def _gradient(stack: Stack, loss: Loss, images: Images, batch: Actions) -> tuple[Tensor, Tensor]:
    """The gradient of every learner's loss [L, numbers], and the share of samples that contributed to it [L]."""
    places, actions, behaviour = batch
    logprobs = _logprobs(stack.views(stack.flat), images, places)
    baseline = logprobs.detach().mul(2).exp().sum(1)
    current = logprobs.gather(1, actions[:, None])[:, 0]
    advantages = (actions == images[1][places]).float() - baseline
    groups = current[:, :, None, None], behaviour[:, :, None, None], advantages[:, :, None]  # of one token each
    gradient, moved = torch.autograd.grad(loss_of(loss, *groups, float(BATCH)), (stack.flat, current))
    return gradient, (moved != 0).float().mean(-1)


def main(options: argparse.Namespace) -> None:
    prepare()
    steps, delays, seeds = (300, (0, 100), (1, 2)) if options.quick else (10_000, DELAYS, (2, 5))
    study = Study(NAMES, RATES, "tune_error", *seeds)
    rows: list[Row] = []
    for delay in delays:
        rows += study.run(f"D={delay}", partial(train, delay=delay, steps=steps, data=load()))
    write(options.out, rows, percent_table(rows, "test_error"), percent_table(rows, "backward_share"))


if __name__ == "__main__":
    main(OPTIONS)
