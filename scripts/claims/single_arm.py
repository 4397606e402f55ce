"""Claim: DG nearly removes the failures' gradient across the true direction (arXiv 2603.14608, second version).

`python -m scripts.claims.single_arm [--quick] [--out FOLDER]`

10 arms, one of them right (reward 1), softmax logits, baseline ½; expectations are exact sums over arms. The policy
gives the right arm π*; the others share the rest by random logits, one draw per seed. The *perpendicular second moment
of failures* is Σ over wrong arms of π_b(arm) · |gradient across ∇π*|²; the *cosine* is that of the expected gradient
with ∇π*. The actor is the learner, or stale: still uniform.
"""

import argparse
from functools import partial
from typing import Any

from .studies import argument_parser, prepare, write

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    OPTIONS = argument_parser(__doc__, "single_arm").parse_args()

import torch
from torch import Tensor

from learners.losses.corrections import exact
from learners.losses.delightful import dg
from learners.losses.weighted import reinforce

from ..analysis.intervals import bootstrap, markdown_table
from .algorithms import Loss, loss_of

ARMS = 10
RIGHT = (0.1, 0.5, 0.9, 0.99)
LOSSES: dict[str, Loss] = {
    "reinforce": reinforce,
    "exact_iw": exact(reinforce),
    "dg η=1": dg,
    "dg η=½": partial(dg, gate_temperature=0.5),
    "dg η=¼": partial(dg, gate_temperature=0.25),
}
UNIFORM = torch.full((ARMS,), 1 / ARMS, dtype=torch.float64)


def policy(right: float, seed: int) -> Tensor:
    """Probabilities [arms], float64; arm 0 is the right one."""
    others = torch.randn(ARMS - 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(0)
    return torch.cat([torch.tensor([right], dtype=torch.float64), (1 - right) * others])


def gradients(loss: Loss, current: Tensor, behaviour: Tensor, baseline: float = 0.5) -> Tensor:
    """The change of the logits by each arm, where it was taken: [arms, arms], of probabilities [arms]."""
    logits = current.log().expand(ARMS, ARMS).clone().requires_grad_()
    logprobs = logits.log_softmax(-1).diagonal().view(ARMS, 1, 1, 1)  # one learner per arm
    advantages = (torch.arange(ARMS) == 0).double() - baseline
    each = loss_of(loss, logprobs, behaviour.log().view(ARMS, 1, 1, 1), advantages.view(ARMS, 1, 1), 1.0)
    (found,) = torch.autograd.grad(each, logits)
    return -found


def moments(loss: Loss, current: Tensor, behaviour: Tensor) -> tuple[float, float]:
    """The perpendicular second moment of failures, and the cosine of the expected gradient."""
    found = gradients(loss, current, behaviour)
    true = -current
    true[0] += 1.0  # ∇π* = π* (e* − π)
    true = true / true.norm()
    across = found - (found @ true)[:, None] * true
    expected = behaviour @ found
    second = behaviour[1:] @ across[1:].square().sum(-1)
    return float(second), float(expected @ true / expected.norm())


def main(options: argparse.Namespace) -> None:
    prepare()
    numbers: dict[str, list[list[Any]]] = {"second moment of failures": [], "cosine": []}
    for actor in ("learner", "uniform"):
        for right in RIGHT:
            policies = [policy(right, seed) for seed in range(3 if options.quick else 20)]
            pairs = [
                [moments(loss, now, now if actor == "learner" else UNIFORM) for now in policies]
                for loss in LOSSES.values()
            ]
            for place, rows in enumerate(numbers.values()):
                rows.append([actor, right, *(bootstrap(pair[place] for pair in each) for each in pairs)])
    header = ["actor", "π*", *LOSSES]
    write(options.out, numbers, *(f"{name}\n\n{markdown_table(header, rows)}" for name, rows in numbers.items()))


if __name__ == "__main__":
    main(OPTIONS)
