"""Claim: DG tolerates a stale actor, REINFORCE and exact importance weights do not (arXiv 2603.20521).

`python -m scripts.claims.digits [--quick] [--out FOLDER]`

The papers' MNIST bandit on scikit-learn's `load_digits` (8 × 8 pixels, 1,797 images): see one image, name one digit,
reward 1 if it is right. A perceptron 64-50-50-10 with ReLU, A = reward − Σ_a π(a)² under the learner's policy, 100
images per batch, Adam, 10,000 steps. The actor's weights are exactly D steps old (the initial ones for the first D).

897 images train, 450 tune, 450 test. Error: share of images whose most likely digit is wrong; `sampled_error`: the same
for sampled digits. `backward_share`: share of samples that have a gradient.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .studies import argument_parser

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    OPTIONS = argument_parser(__doc__, "digits").parse_args()

import torch
from torch import Tensor

from ..plotting.drawing import keep
from ..plotting.plot import Plot, Point
from .algorithms import ALGORITHMS, Algorithm, loss_of
from .stacks import Stack, perceive, perceptron
from .studies import (
    Cell,
    Measure,
    Row,
    Study,
    by_number,
    percent_tables,
    points,
    prepare,
    same_algorithm,
    tell,
)
from .tokens import Draws

SIZES = (64, 50, 50, 10)
BATCH = 100
DELAYS = (0, 10, 100, 300, 1000)
NAMES = ("reinforce", "exact_iw", "ppo", "positive_only", "dg")
RATES = (3e-4, 1e-3, 3e-3)
FINDING = "DG stays at or below 4 % error however old the actor; REINFORCE fails, but PPO and successes alone do not"


@dataclass(frozen=True, slots=True)
class Images:
    """`pixels` float32 [64, N] in [0, 1], `digits` int64 [N]."""

    pixels: Tensor
    digits: Tensor


def load() -> dict[str, Images]:
    """Images that "train", "tune" and "test": a fixed split, with equal shares of each digit."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, digits = load_digits(return_X_y=True)
    rest = train_test_split(pixels / 16.0, digits, test_size=450, random_state=0, stratify=digits)
    train = train_test_split(rest[0], rest[2], test_size=450, random_state=0, stratify=rest[2])

    def images(pixels: Any, digits: Any) -> Images:
        return Images(torch.tensor(pixels.T, dtype=torch.float32), torch.tensor(digits, dtype=torch.int64))

    return {
        "train": images(train[0], train[2]),
        "tune": images(train[1], train[3]),
        "test": images(rest[1], rest[3]),
    }


@dataclass(slots=True)
class Actions:
    """What actors did: `images` int64 [L, 100], `actions` int64 and `behaviour` logprobs [L, 100]."""

    images: Tensor
    actions: Tensor
    behaviour: Tensor


@torch.no_grad()
def act(stack: Stack, images: Images, draws: Draws) -> Actions:
    """One batch of actors with the stack's current weights."""
    places = (draws(BATCH) * len(images.digits)).long()
    logprobs = perceive(stack.views(stack.flat), columns(images, places)).log_softmax(1)
    actions = (logprobs.exp().cumsum(1)[:, :-1] <= draws(BATCH)[:, None]).sum(1)
    return Actions(places, actions, logprobs.gather(1, actions[:, None])[:, 0])


def columns(images: Images, places: Tensor) -> Tensor:
    """Pixels [L, 64, N] of the images at `places` [L, N]."""
    return images.pixels.T[places].transpose(1, 2)


def train(
    cells: Sequence[Cell], delay: int, steps: int, images: Images, tests: dict[str, Images]
) -> list[dict[str, Any]]:
    """Each cell's numbers: NAME_error and NAME_sampled_error on each of `tests`, and its backward share."""
    seeds = [cell.seed for cell in cells]
    stack = Stack(perceptron(seeds, SIZES), torch.tensor([cell.rate for cell in cells]))
    draws = Draws(seeds)
    parts = [(ALGORITHMS[name], rows) for name, rows in same_algorithm(cells)]
    # A batch of weights that are D steps old is the one that was sampled D steps ago.
    waiting = deque(act(stack, images, draws) for _ in range(delay))
    backward = torch.zeros(len(cells))
    for _ in range(steps):
        waiting.append(act(stack, images, draws))
        gradient, used = _gradient(stack, parts, images, waiting.popleft())
        stack.step(gradient)
        backward += used / steps
    found: list[dict[str, Any]] = [{"backward_share": share} for share in backward.tolist()]
    for name, test in tests.items():
        logits = perceive(stack.views(stack.flat), test.pixels.expand(len(cells), -1, -1))
        wrong = (logits.argmax(1) != test.digits).float().mean(-1).tolist()
        sampled = 1 - logits.softmax(1)[:, test.digits, torch.arange(len(test.digits))].mean(-1)
        for numbers, error, policy in zip(found, wrong, sampled.tolist(), strict=True):
            numbers |= {f"{name}_error": error, f"{name}_sampled_error": policy}
    return found


def _gradient(
    stack: Stack, parts: Sequence[tuple[Algorithm, slice]], images: Images, batch: Actions
) -> tuple[Tensor, Tensor]:
    """The gradient of every learner's loss [L, numbers], and the share of samples that contributed to it [L]."""
    leaf = stack.flat.clone().requires_grad_()
    logprobs = perceive(stack.views(leaf), columns(images, batch.images)).log_softmax(1)
    baseline = logprobs.detach().mul(2).exp().sum(1)
    current = logprobs.gather(1, batch.actions[:, None])[:, 0]
    current.retain_grad()
    advantages = (batch.actions == images.digits[batch.images]).float() - baseline
    losses = [
        loss_of(
            algorithm,
            current[rows, :, None, None],  # 100 groups of one sample of one token
            batch.behaviour[rows, :, None, None],
            advantages[rows, :, None],
            float(BATCH),
        )
        for algorithm, rows in parts
    ]
    torch.stack(losses).sum().backward()
    assert leaf.grad is not None and current.grad is not None
    return leaf.grad, (current.grad != 0).float().mean(-1)


def measure(delay: int, steps: int) -> Measure:
    data = load()
    tests = {name: data[name] for name in ("tune", "test")}
    return lambda cells: train(cells, delay, steps, data["train"], tests)


def figure(found: Mapping[str, Mapping[str, Point]], finding: str) -> Plot:
    """algorithm → `D=delay` → error in %."""
    return Plot(
        "against",
        finding or "Test error against the age of the actor's weights",
        {"": by_number(found)},
        x="age of the actor's weights, in updates",
        y="test error, % (logarithmic)",
        log=True,
        note="Scikit-learn's digits as a one-step bandit; learning rate tuned for each algorithm and age.",
    )


def main(options: argparse.Namespace) -> None:
    prepare()
    steps, delays, tuning, fresh = (300, (0, 100), 1, 2) if options.quick else (10_000, DELAYS, 2, 5)
    study = Study(
        options.out, NAMES, RATES, tuple(range(tuning)), tuple(range(100, 100 + fresh)), tuned_by="tune_error"
    )
    rows: list[Row] = []
    for delay in delays:
        rows += study.run(f"D={delay}", measure(delay, steps), {"delay": delay, "steps": steps})
    tell(options.out, *percent_tables(rows, "test_error", "test_sampled_error"))
    keep(figure(points(rows, "test_error", 100), "" if options.quick else FINDING), options.out / "digits.png")


if __name__ == "__main__":
    main(OPTIONS)
