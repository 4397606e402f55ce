"""Claim: DG nearly removes the failures' gradient across the true direction (arXiv 2603.14608, second version).

`python -m scripts.claims.single_arm [--quick] [--out FOLDER]`

10 arms, one of them right (reward 1), softmax logits, baseline ½; expectations are exact sums over arms. The policy
gives the right arm π*; the others share the rest by random logits, one draw per seed. The actor is the learner, or
stale: still uniform. Printed: Σ over wrong arms of π_b(arm) · |gradient across ∇π*|², and the cosine of the expected
gradient with ∇π*.
"""

import argparse
from functools import partial

from .studies import argument_parser, prepare, write

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    OPTIONS = argument_parser(__doc__, "single_arm").parse_args()

import torch
from torch import Tensor

from learners.losses.delightful import dg

from ..analysis.intervals import bootstrap, markdown_table
from .algorithms import ALGORITHMS, Loss, loss_of

ARMS = 10
LOSSES = {name: ALGORITHMS[name] for name in ("reinforce", "exact_iw", "dg")}
LOSSES |= {f"dg η={gate}": partial(dg, gate_temperature=gate) for gate in (0.5, 0.25)}
UNIFORM = torch.full((ARMS,), 1 / ARMS, dtype=torch.float64)


def policy(right: float, seed: int) -> Tensor:
    """Probabilities [arms], float64; arm 0 is the right one."""
    others = torch.randn(ARMS - 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(0)
    return torch.cat([torch.tensor([right], dtype=torch.float64), (1 - right) * others])


def gradients(loss: Loss, current: Tensor, behaviour: Tensor) -> Tensor:
    """The change of the logits by each arm, where it was taken: [arms, arms], of probabilities [arms]."""
    logits = current.log().expand(ARMS, ARMS).clone().requires_grad_()
    logprobs = logits.log_softmax(-1).diagonal().view(ARMS, 1, 1, 1)  # one learner per arm
    advantages = (torch.arange(ARMS) == 0).double() - 0.5
    each = loss_of(loss, logprobs, behaviour.log().view(ARMS, 1, 1, 1), advantages.view(ARMS, 1, 1), 1.0)
    return -torch.autograd.grad(each, logits)[0]


def moments(loss: Loss, current: Tensor, behaviour: Tensor) -> tuple[float, float]:
    """The perpendicular second moment of failures, and the cosine of the expected gradient."""
    found, true = gradients(loss, current, behaviour), torch.eye(ARMS)[0].double() - current  # ∇π* = π* (e* − π)
    true = true / true.norm()
    across, expected = found - (found @ true)[:, None] * true, behaviour @ found
    return float(behaviour[1:] @ across[1:].square().sum(-1)), float(expected @ true / expected.norm())


def main(options: argparse.Namespace) -> None:
    prepare()
    rows = []
    for actor, right in ((actor, right) for actor in ("learner", "uniform") for right in (0.1, 0.5, 0.9, 0.99)):
        policies = [policy(right, seed) for seed in range(3 if options.quick else 20)]
        pairs = [(now, now if actor == "learner" else UNIFORM) for now in policies]
        found = [[moments(loss, *pair) for pair in pairs] for loss in LOSSES.values()]
        for place, number in enumerate(("second moment", "cosine")):
            rows.append([number, actor, right, *(bootstrap(each[place] for each in cell) for cell in found)])
    write(options.out, rows, markdown_table(["", "actor", "π*", *LOSSES], sorted(rows, key=lambda row: row[0])))


if __name__ == "__main__":
    main(OPTIONS)
