"""Gradients group by group while a round still runs: helpers of the learner.

This is the stream trainer of RollPacker (arXiv 2509.21009): finished groups go through forward and backward passes at
once, under the weights of the round; nothing is applied yet. A loss is a sum over tokens, so the sums of all groups,
divided at the end by the denominator of the whole batch, are the gradient of that batch.

This needs a step of one pass over one minibatch. No token's gradient may depend on anything known only at the end of
the batch. Groups are taken in the order of the batch, always the same number at a time, whether they came early or with
the batch. So training a batch again, after a crash or in a replay, gives the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from areal_like.types import Batch
from learners.advantages import marked
from learners.losses.contract import LossFunction, plan_of
from learners.step import Step


def check_stream(
    stream: bool,
    loss: LossFunction,
    advantage: Callable[..., Any],
    minibatches: int,
    epochs: int,
    by_staleness: bool,
    at_once: int,
) -> bool:
    """Returns `stream`. Raise ValueError if it is wanted and this loss or advantage cannot be computed group by
    group."""
    if not stream:
        return False
    if minibatches > 1 or epochs > 1:
        raise ValueError("stream takes one step per batch: num_minibatches and num_minibatch_epochs must be 1")
    if plan_of(loss):
        raise ValueError("stream: this loss weighs all tokens of a batch before it takes a gradient")
    if marked(advantage, "needs_batch"):
        raise ValueError("stream: this advantage is normalised over the whole batch")
    if at_once < 1:
        raise ValueError(f"stream_groups must be at least 1, got {at_once}")
    if by_staleness:
        raise ValueError("stream can't measure grad_norm_by_staleness")
    return True


def is_start_of(taken: Sequence[Batch], batch: Batch) -> bool:
    """Does the batch begin with the groups of these parts, at the same version?"""
    groups = [(part.index, part.version, group.id) for part in taken for group in part.groups]
    return groups == [(batch.index, batch.version, group.id) for group in batch.groups[: len(groups)]]


def combined(steps: Sequence[Step]) -> Step:
    """Combine steps made group by group into one, enough for its metrics. The steps keep their tokens' numbers."""
    first, others = copy.copy(steps[0]), steps[1:]
    for each in others:
        first.tally.join(each.tally)
        first.input_tokens += each.input_tokens
        first.backward_tokens += each.backward_tokens
        first.computed_tokens += each.computed_tokens
        first.denominator += each.denominator
    for name in ("proximal", "behaviour", "staleness", "in_flight"):
        setattr(first, name, torch.cat([getattr(each, name) for each in steps]))
    counts = np.cumsum([0] + [len(each.columns.lengths) for each in steps])
    first.sample = torch.cat([each.sample + int(before) for each, before in zip(steps, counts, strict=False)])
    total = sum(loss for each in steps for loss in each.losses)
    first.losses = [total / first.denominator] if first.denominator else []
    return first
