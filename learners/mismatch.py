"""Engine against learner: how far an engine's logprobs are from the learner's own under the same weights.

`mismatch_kl` is k3 (Schulman's estimator of KL(behaviour ‖ learner), per token) and `mismatch_max` the largest
|Δ logprob|, over tokens that were sampled by one version from the first token of their response on. Only kernels and
number formats make them differ. Tokens that follow an in-flight update have their own metrics (`mismatch_kl/in_flight`,
`mismatch_max/in_flight`): if the engine keeps the KV cache of older weights, that adds to the difference.

Tokens of staleness 0 cost nothing: the step itself scores them under its own weights. An asynchronous run has few of
these. So a probe keeps the weights of one version until tokens of it are trained, and scores one group with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from torch import Tensor

from areal_like.types import Batch, Group, Sample
from learners.collectives import Ranks
from learners.optim import MasterAdamW
from learners.packing import Columns, MicroBatch

Scorer = Callable[[Columns | None, list[np.ndarray]], Iterable[tuple[MicroBatch, Tensor]]]
"""(columns, or None where another rank has them; samples int [m] in parts) → logprobs of their trained tokens, by
micro-batch."""

LAST = 1 << 40
"""A place after all groups of a batch."""
NO_SAMPLES = np.empty(0, np.int64)


def mismatch(log_ratio: np.ndarray, in_flight: np.ndarray) -> dict[str, float]:
    """Metrics from log(learner / engine) [N] of tokens scored by the version that sampled them; `in_flight` bool [N]:
    tokens after a weight update within their response."""
    metrics = {}
    for suffix, members in (("", ~in_flight), ("/in_flight", in_flight)):
        moved = log_ratio[members].astype(np.float64)
        if len(moved):
            metrics[f"mismatch_kl{suffix}"] = float((np.expm1(moved) - moved).mean())
            metrics[f"mismatch_max{suffix}"] = float(np.abs(moved).max())
    return metrics


class MismatchProbe:
    """After `every` train steps without tokens of staleness 0, keeps a version's weights, in host memory and in the
    published dtype. Scores a group with them when one of that version comes. With 0 it does nothing.

    The learner calls `look` with each batch before training it, on all ranks. When it returns, the weights are the
    published ones again, bit for bit.
    """

    def __init__(self, optimizer: MasterAdamW, ranks: Ranks, every: int):
        self._optimizer, self._ranks, self._every = optimizer, ranks, every
        self._version, self._steps = 0, 0
        self._weights: Tensor | None = None

    def look(self, batch: Batch, score: Scorer) -> dict[str, float]:
        """The metrics of `mismatch` if this batch has tokens of the kept version, else {}."""
        if not self._every:
            return {}
        places = batch.places or range(len(batch.groups))
        kept = {place: group for place, group in zip(places, batch.groups, strict=True) if self._is_of_kept(group)}
        fresh = any(_begins_at(sample, batch.version) for sample in batch.samples)
        if self._ranks.max(fresh):
            self._weights, self._steps = None, 0
            return {}
        first = LAST - self._ranks.max(max((LAST - place for place in kept), default=0))
        metrics = {} if first == LAST else self._scored(kept.get(first), batch, score)
        self._keep(batch)
        return metrics

    def _is_of_kept(self, group: Group) -> bool:
        return self._weights is not None and any(_begins_at(sample, self._version) for sample in group.samples)

    def _keep(self, batch: Batch) -> None:
        """Keep the weights that are about to change, if it is time or no token of the kept version can still come."""
        self._steps += 1
        outdated = self._version < batch.oldest_allowed
        if outdated if self._weights is not None else self._steps >= self._every:
            self._version, self._weights = batch.version, self._optimizer.published()

    def _scored(self, group: Group | None, batch: Batch, score: Scorer) -> dict[str, float]:
        """One of the ranks has the group."""
        assert self._weights is not None
        columns = None if group is None else Columns(replace(batch, groups=[group], places=None))
        scored = columns and columns.only(columns.version == self._version)
        moved, in_flight = [np.empty(0, np.float32)], [np.empty(0, np.int8)]  # of this rank
        with self._optimizer.holding(self._weights):
            for part, logprobs in score(scored, [np.flatnonzero(scored.lengths) if scored else NO_SAMPLES]):
                if columns is not None:
                    places = part.trained.cpu().numpy()
                    moved.append(logprobs.cpu().numpy() - columns.behaviour[places])
                    in_flight.append(columns.in_flight[places].astype(np.int8))
        found = self._ranks.gathered([np.concatenate(moved), np.concatenate(in_flight)])
        every, updated = (np.concatenate(column) for column in zip(*found, strict=True))
        self._weights, self._steps = None, 0
        return mismatch(every, updated.astype(bool))


def _begins_at(sample: Sample, version: int) -> bool:
    """Did this version sample the first tokens of the response, and is one of these trained?"""
    first, count = sample.runs[0]
    return first == version and bool(sample.loss_mask[:count].any())
