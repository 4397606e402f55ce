"""Notes which experts the routers of the embedded engine's model choose for its running sequences (router replay), when
a sequence reaches a position: if it is recomputed under new weights, the record of its tokens does not change."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.engines.slot_table import PositionSpan, SlotRequest
from areal_like.models.causal_lm import routers_of, routing_of


class ChosenExperts:
    """Of up to `slots` sequences; slots as in `SlotTable`. Raises ValueError for a model without routers it knows."""

    def __init__(self, model: PreTrainedModel, slots: int):
        self.routing = routing_of(model)
        layers, top_k, _ = self.routing.shape
        self._newest: list[Tensor | None] = [None] * layers  # of the last forward pass, by layer: [tokens, k]
        self._kept = np.zeros((slots, 0, layers, top_k), self.routing.dtype)
        for number, (_, _, router) in enumerate(routers_of(model)):
            router.register_forward_hook(partial(self._note, number))

    def _note(self, number: int, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._newest[number] = output[2]

    def newest(self) -> Tensor:
        """Of the last forward pass, on its device: int64 [tokens, layers, k]."""
        return torch.stack([each for each in self._newest if each is not None], 1)

    def reserve(self, time: int) -> None:
        extra = time - self._kept.shape[1]
        if extra > 0:
            more = max(extra, self._kept.shape[1])
            self._kept = np.pad(self._kept, ((0, 0), (0, more), (0, 0), (0, 0)))

    def prefilled(self, chunk: list[PositionSpan]) -> None:
        """The last forward pass was over these spans, a row each."""
        newest = self.newest().cpu().numpy()
        for span, found in zip(chunk, newest.reshape(len(chunk), -1, *newest.shape[1:]), strict=True):
            self._kept[span.slots, span.start : span.stop] = found[: span.stop - span.start]

    def decoded(self, lengths: np.ndarray, found: np.ndarray) -> None:
        """The last token of each sequence, of these lengths int64 [n], had `found` [n, layers, k]."""
        self.reserve(int(lengths.max()))
        self._kept[np.arange(len(lengths)), lengths - 1] = found

    def move(self, source: int, target: int, time: int) -> None:
        self._kept[target, :time] = self._kept[source, :time]

    def collect(self, request: SlotRequest, length: int) -> None:
        """Give a request, which leaves its slot with `length` tokens, those that it does not have yet."""
        known = sum(map(len, request.experts))
        request.experts.append(self._kept[request.slot, known : length - 1].copy())
