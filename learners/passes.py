"""Forward passes over a batch in micro-batches, with and without gradient. Every rank computes its own groups in the
same number of micro-batches, because all ranks together gather a sharded model's layers; its last ones may be empty."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_like.types import Batch, Group, Sample
from learners.collectives import Ranks
from learners.logprobs import forward_logprobs
from learners.packing import Columns, MicroBatch, empty_microbatch


class Passes:
    """`micro_batch_tokens` bounds the tokens of a micro-batch; `temperature` is the run's. With `half_matrices`,
    matrices are multiplied in bfloat16; with `experts`, tokens go to those that the engine's routers chose."""

    def __init__(
        self,
        model: PreTrainedModel,
        ranks: Ranks,
        device: torch.device,
        temperature: float,
        *,
        micro_batch_tokens: int,
        half_matrices: bool,
        experts: bool,
    ):
        self._model, self._ranks, self._device = model, ranks, device
        self.temperature = temperature
        self._micro_batch_tokens, self._half, self._experts = micro_batch_tokens, half_matrices, experts

    def precision(self) -> torch.autocast:
        """The context of a forward pass."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._half)

    def microbatches(self, columns: Columns | None, samples: np.ndarray) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the given samples: as many as others have, so the last may have no tokens."""
        cuts: list[np.ndarray] = []
        if columns:
            samples = samples[(columns.lengths[samples] > 0) & columns.own[samples]]
            cuts = columns.cuts(samples, self._micro_batch_tokens)
        count = self._ranks.max(len(cuts))
        for part in cuts:
            assert columns
            made = columns.microbatch(part, self._device, self._micro_batch_tokens)
            yield made if self._experts else replace(made, experts=None)
        for _ in range(count - len(cuts)):
            yield empty_microbatch(self._device)

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
                    yield part, forward_logprobs(model or self._model, asked, temperature or self.temperature)[0]

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
