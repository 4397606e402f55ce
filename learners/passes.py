"""Forward passes over a batch in micro-batches, with and without gradient; plans of losses.

Every rank computes its own groups in the same number of micro-batches, because all ranks together gather a sharded
model's layers; its last ones may be empty."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_like.types import Batch, Group, Sample
from learners.collectives import Ranks
from learners.logprobs import forward_logprobs
from learners.losses.contract import LossFunction, marks_of, planned_for
from learners.packing import Columns, MicroBatch, empty_microbatch
from learners.step import Step
from learners.untrainable import Interrupted

ASK_TOKENS = 2048
"""Tokens of micro-batches after which ranks ask one another whether to stop: 1 % of a smaller one's time."""


@dataclass(eq=False)
class Passes:
    """`micro_batch_tokens` bounds the tokens of a micro-batch; `temperature` is the run's. With `half_matrices`,
    matrices are multiplied in bfloat16; with `experts`, tokens go to those that the engine's routers chose; with
    `balanced`, micro-batches are of nearly equal lengths. Between micro-batches `interrupted` may end the passes of all
    ranks (Interrupted)."""

    model: PreTrainedModel
    ranks: Ranks
    device: torch.device
    temperature: float
    micro_batch_tokens: int
    half_matrices: bool
    experts: bool
    balanced: bool = False
    interrupted: Callable[[], bool] = lambda: False

    def precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.half_matrices)

    def halve(self) -> int:
        """Halve the tokens of a micro-batch; returns their number."""
        self.micro_batch_tokens = max(1, self.micro_batch_tokens // 2)
        return self.micro_batch_tokens

    def microbatches(self, columns: Columns | None, samples: np.ndarray) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the given samples: as many as others have, so the last may have no tokens."""
        cuts: list[np.ndarray] = []
        if columns:
            samples = samples[(columns.lengths[samples] > 0) & columns.own[samples]]
            cuts = columns.cuts(samples, self.micro_batch_tokens, self.balanced)
        count = self.ranks.max(len(cuts))
        every = 1 if self.ranks.count == 1 else -(-ASK_TOKENS // self.micro_batch_tokens)
        for number in range(count):
            if number % every == 0 and self.ranks.max(int(self.interrupted())):
                raise Interrupted("the run was asked to end")
            if number >= len(cuts):
                yield empty_microbatch(self.device)
                continue
            assert columns
            part = cuts[number]
            made = columns.microbatch(part, self.device, self.micro_batch_tokens)
            yield made if self.experts else replace(made, experts=None)

    @torch.no_grad()
    def logprobs(
        self,
        columns: Columns | None,
        minibatches: Sequence[np.ndarray],
        model: PreTrainedModel | None = None,
        temperature: float | None = None,
    ) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Logprobs of all trained tokens of some minibatches, micro-batch by micro-batch, without gradient. At the
        run's temperature, if no other is given. Another `model`, the reference, chooses its experts itself."""
        if minibatches:
            for part in self.microbatches(columns, np.concatenate(minibatches)):
                asked = part if model is None else replace(part, experts=None)
                with self.precision():
                    yield part, forward_logprobs(model or self.model, asked, temperature or self.temperature)[0]

    def logprobs_of(self, sequences: list[list[int]]) -> list[list[float]]:
        """Logprobs, at temperature 1, of all tokens after the first of each sequence."""
        columns = Columns(Batch(0, 0, [Group(i, [_whole(tokens)]) for i, tokens in enumerate(sequences)]))
        found = np.zeros(len(columns.sample), np.float32)
        for part, logprobs in self.logprobs(columns, [np.arange(len(sequences))], temperature=1.0):
            found[part.trained.cpu().numpy()] = logprobs.float().cpu().numpy()
        ends = np.cumsum([len(tokens) - 1 for tokens in sequences])[:-1]
        return [row.tolist() for row in np.split(found, ends)]


def _whole(tokens: list[int]) -> Sample:
    """A sample in which all tokens but the first are trained."""
    n = len(tokens) - 1
    return Sample(np.array(tokens, np.int32), 1, np.zeros(n, np.float32), np.ones(n, bool), [(0, n)], 0.0, "length")


class Planner:
    """Lets a loss weigh all tokens of a minibatch before any of them is differentiated (`contract.planned_for`).
    `starts_known`: a step's proximal logprobs are there before its first minibatch."""

    def __init__(self, loss: LossFunction, passes: Passes, ranks: Ranks, starts_known: bool):
        self._loss, self._marks = loss, marks_of(loss)
        self._passes, self._ranks, self._starts_known = passes, ranks, starts_known

    def plan(self, step: Step, samples: np.ndarray, at_start: bool) -> Columns:
        """Put the plan of a minibatch into `step`; returns the columns that need a gradient."""
        assert self._marks.plan
        current = torch.full_like(step.behaviour, torch.nan)
        places = step.on_device(step.columns.tokens_of(samples))
        if self._marks.plan.needs_current:
            if at_start and self._starts_known:
                current.copy_(step.proximal)
            else:
                for part, logprobs in self._passes.logprobs(step.columns, [samples]):
                    current[part.trained] = logprobs
            current = self._ranks.sum_disjoint(current, step.own)
            if at_start:
                step.proximal[places] = current[places]
        around = self._marks.wants_proximal
        if around:
            step.proximal = self._ranks.sum_disjoint(step.proximal, step.own)
        minibatch = step.loss_batch(places, current[places], step.sample[places], with_proximal=around)
        minibatch, observed = planned_for(self._loss, minibatch)
        assert minibatch.weights is not None
        step.plan(places, minibatch.weights, observed)
        columns = step.columns
        if self._marks.plan.skips:
            assert step.weights is not None
            columns = columns.only((step.weights != 0).cpu().numpy())
        skipped = places[step.own[places] & ~torch.isin(places, step.on_device(columns.tokens_of(samples)))]
        step.observe(step.foreseen(skipped), skipped, "loss/")  # of the others when the loss is known
        return columns
