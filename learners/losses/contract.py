"""The contract of a policy loss: its inputs, outputs and marks, and helpers that losses share.

A loss has the form `(batch, denominator, *, knobs) -> (loss, observed)`. The loss is a SUM over the trained tokens of a
micro-batch divided by the `denominator` passed in, so the cut of a minibatch into micro-batches cannot change its
gradient. `observed` maps names to one number per token [N], without gradient. Three policies have the same names
everywhere: *behaviour* sampled the token, *proximal* is the learner's policy at the start of the train step, *current*
carries the gradient.

Masked tokens may hold any value, NaN included: they change neither the loss nor its gradient. Log ratios are clamped to
±`LOG_RATIO_LIMIT` and logprobs to `LOGPROB_FLOOR`, so tokens that are impossible under a policy stay finite, and have
no gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from learners.advantages import mark_as

LOG_RATIO_LIMIT = 20.0
LOGPROB_FLOOR = -1000.0
IMPOSSIBLE = -1e30
"""Stands for a logprob of −inf in differences, which would be NaN if both were."""

Observed = dict[str, Tensor]
LossFunction = Callable[["LossBatch", float], tuple[Tensor, Observed]]
"""A loss whose knobs are bound."""


@dataclass(slots=True)
class LossBatch:
    """The response tokens of one micro-batch (of one minibatch, where a plan is made), flat [N].

    A sequence is never split, and its tokens lie side by side in order. Logprobs and advantages are floating point,
    `current` with gradient; `mask` bool is True where the token is trained; `sequence` and `group` int64 number the
    sequence and the group of each token; `staleness` int64 is train version − version of the token. `share` is the
    token's weight in the sum over tokens (None: 1). `weights` are for losses marked with `planned`. `sequences` is
    above every number of a sequence.
    """

    current: Tensor
    behaviour: Tensor
    proximal: Tensor | None
    advantages: Tensor
    mask: Tensor
    sequence: Tensor
    staleness: Tensor
    share: Tensor | None = None
    group: Tensor | None = None
    weights: Tensor | None = None
    sequences: Any = None  # an int; the other fields are tensors, and may be given as a dict of such

    @property
    def most_sequences(self) -> int:
        """A number above every number of a sequence."""
        if self.sequences is not None:
            return self.sequences
        return int(self.sequence.max()) + 1 if len(self.sequence) else 0


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """What is decided over a whole minibatch, without gradient, before its micro-batches: `weigh(minibatch, *, knobs)`
    takes the loss's own knobs and returns `LossBatch.weights` for every token, and the observations. With
    `needs_current` the minibatch goes through a forward pass without gradient first; without, its `current` is NaN.
    With `skips`, tokens of weight 0, which the loss must give no gradient, are left out of the passes with gradient."""

    weigh: Callable[..., tuple[Tensor, Observed]]
    needs_current: bool = True
    skips: bool = False


@dataclass(frozen=True, slots=True)
class Marks:
    """What a loss needs from the learner; each of the first five is also a decorator. `wants_proximal`: it needs
    `LossBatch.proximal`; if it has a knob `proximal`, only where that is "recompute". `ratio_to_behaviour`: it contains
    current/behaviour, so a correction must not weigh by that ratio again. `clips_finely`: its clip range is finer than
    bfloat16 rounding, so engine and learner must compute alike. `single_pass`: it diverges with more than one pass over
    a batch. `plan` (the decorator is `planned`): it needs `LossBatch.weights`.

    `own_ratio`: the policies whose ratio it contains, "proximal_current", "behaviour_current" or None.
    """

    wants_proximal: bool = False
    ratio_to_behaviour: bool = False
    clips_finely: bool = False
    single_pass: bool = False
    plan: MinibatchPlan | None = None
    own_ratio: str | None = None


wants_proximal, ratio_to_behaviour = mark_as("wants_proximal"), mark_as("ratio_to_behaviour")
clips_finely, single_pass = mark_as("clips_finely"), mark_as("single_pass")
planned = partial(mark_as, "plan")


def marks_of(loss: Callable[..., Any]) -> Marks:
    """The marks of a loss, bare or with bound knobs, which its plan gets, too."""
    if isinstance(known := getattr(loss, "marks", None), Marks):
        return known
    function, knobs = getattr(loss, "func", loss), getattr(loss, "keywords", {})
    found: dict[str, Any] = {each.name: getattr(function, each.name, each.default) for each in fields(Marks)}
    proximal = proximal_of(loss) if found["wants_proximal"] else None
    found["wants_proximal"] = proximal == "recompute"
    if proximal is not None:
        found["own_ratio"] = "proximal_current"
    elif found["ratio_to_behaviour"]:
        found["own_ratio"] = "behaviour_current"
    if plan := found["plan"]:
        found["plan"] = replace(plan, weigh=partial(plan.weigh, **knobs))
    return Marks(**found)


def proximal_of(loss: Callable[..., Any]) -> str | None:
    """The knob `proximal` of a loss; "recompute" where it has none."""
    defaults = getattr(getattr(loss, "func", loss), "__kwdefaults__", None) or {}
    return getattr(loss, "keywords", {}).get("proximal", defaults.get("proximal", "recompute"))


@torch.no_grad()
def planned_for(loss: Callable[..., Any], minibatch: LossBatch) -> tuple[LossBatch, Observed]:
    """The minibatch with the weights that `loss` plans for it, and the plan's observations."""
    plan = marks_of(loss).plan
    if plan is None:
        return minibatch, {}
    weights, observed = plan.weigh(minibatch)
    return replace(minibatch, weights=weights), observed


def merged(first: Observed, second: Observed) -> Observed:
    """Two observations of the same tokens. Weights multiply; a token is cut or left out if it is in either."""
    common = first.keys() & second.keys()
    both = {n: first[n] * second[n] if n == "behaviour_weight" else first[n] | second[n] for n in common}
    return first | second | both


def total(objective: Tensor, batch: LossBatch, denominator: float) -> Tensor:
    """The loss for per-token objectives [N] to maximise: − Σ share · objective ÷ denominator."""
    if batch.share is not None:
        objective = objective * batch.share
    return -torch.where(batch.mask, objective, 0.0).sum() / denominator


def shares(batch: LossBatch) -> Tensor:
    """`batch.share`, also where it is None: [N], 0 for masked tokens."""
    share = torch.ones_like(batch.advantages) if batch.share is None else batch.share
    return torch.where(batch.mask, share, 0.0)


def sequence_sums(values: Tensor, batch: LossBatch) -> Tensor:
    """For each token, the sum of `values` [N] over the trained tokens of its sequence: [N]."""
    sums = values.new_zeros(batch.most_sequences)
    return sums.index_add(0, batch.sequence, torch.where(batch.mask, values, 0.0))[batch.sequence]


def sequence_means(values: Tensor, batch: LossBatch) -> Tensor:
    """For each token, the mean of `values` [N] over the trained tokens of its sequence: [N]; 0 without any."""
    return sequence_sums(values, batch) / sequence_sums(torch.ones_like(values), batch).clamp(min=1.0)


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """Difference of two logprobs [N], within ±`LOG_RATIO_LIMIT`, and 0 where the mask is False or both are −inf."""
    difference = numerator.clamp(min=IMPOSSIBLE) - denominator.clamp(min=IMPOSSIBLE)
    return torch.where(mask, difference, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """Probability ratio [N] of two logprobs [N]: finite, and 1 where the mask is False."""
    return log_ratio(numerator, denominator, mask).exp()


def current_logprobs(batch: LossBatch) -> Tensor:
    """`batch.current` at `LOGPROB_FLOOR` or above, and 0 where the mask is False: [N], with gradient."""
    return torch.where(batch.mask, batch.current, 0.0).clamp(min=LOGPROB_FLOOR)


def score_loss(weights: Tensor, batch: LossBatch, denominator: float) -> Tensor:
    """The loss whose gradient is − Σ weight · ∇log π ÷ denominator; `weights` [N] are held constant."""
    held = torch.where(batch.mask, weights.detach(), 0.0)
    return total(held * current_logprobs(batch), batch, denominator)


def required(values: Tensor | None, what: str, loss: str) -> Tensor:
    """Raise ValueError if something that a loss needs is missing."""
    if values is None:
        raise ValueError(f"{loss} needs {what}")
    return values
