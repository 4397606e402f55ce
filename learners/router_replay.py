"""Router replay: the learner's model uses the experts that the engine's model chose (R3, arXiv 2510.11370).

If two experts are nearly equally likely, the routers of engine and learner may choose differently, and a token's
logprob differs by far more than rounding. With replay only the choice is the engine's: the learner weighs the given
experts by its own logits and softmax, so the gradient reaches the router. Each layer passes the experts of its row to
its router while it computes, so a layer that is recomputed in the backward pass uses the same ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_like.models.causal_lm import routers_of, routing_of
from areal_like.models.experts import Routing
from areal_like.types import Sample
from learners.collectives import Ranks

UNKNOWN = -1
"""Sentinel: experts unknown."""


@dataclass(frozen=True, slots=True)
class EngineExperts:
    """`place` int64 [tokens] is where a token's experts stand in `known` [positions, layers, k]; UNKNOWN: nowhere."""

    known: np.ndarray
    place: np.ndarray

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> EngineExperts | None:
        """None if no sample has experts. Positions after a sample's known ones are UNKNOWN."""
        known = [sample.experts for sample in samples if sample.experts is not None]
        if not known:
            return None
        place = np.full(sum(len(sample.tokens) for sample in samples), UNKNOWN, np.int64)
        token = position = 0
        for sample in samples:
            count = 0 if sample.experts is None else len(sample.experts)
            place[token : token + count] = np.arange(position, position + count)
            token, position = token + len(sample.tokens), position + count
        return cls(np.concatenate(known), place)

    def at(self, tokens: np.ndarray) -> np.ndarray:
        """The experts of some tokens (int64 [S]): int16 [S, layers, k], UNKNOWN where they are not known."""
        place = self.place[tokens]
        found = self.known[np.maximum(place, 0)].astype(np.int16)
        found[place == UNKNOWN] = UNKNOWN
        return found

    def labels(self, tokens: np.ndarray) -> np.ndarray:
        """A label per token, int64 from 0 on: equal if both tokens (int64 [n], not negative) and experts are equal."""
        rows = np.ascontiguousarray(self.known.reshape(len(self.known), -1))
        kinds = np.unique(rows.view(np.dtype((np.void, rows[:1].nbytes)))[:, 0], return_inverse=True)[1]
        kind = np.where(self.place == UNKNOWN, 0, kinds[np.maximum(self.place, 0)] + 1)
        return np.unique(tokens * (len(kinds) + 1) + kind, return_inverse=True)[1]


class ReplayedRouter:
    """Replaces a router's `forward`. While `told`, int16 [N, k], is set, it weighs these experts, and chooses itself
    where they are `UNKNOWN`. `counts` [3]: positions, those with known experts, those where it would choose others."""

    def __init__(self, router: nn.Module):
        self._forward = router.forward
        self._normalises = bool(getattr(router, "norm_topk_prob", True))
        self.told: Tensor | None = None
        self.counts: Tensor | None = None

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, own = self._forward(hidden_states)
        if self.told is None:
            return logits, weights, own
        known = self.told[:, :1] != UNKNOWN
        chosen = torch.where(known, self.told.long(), own)
        likely = nn.functional.softmax(logits, dtype=torch.float, dim=-1).gather(-1, chosen)
        if self._normalises:
            likely = likely / likely.sum(dim=-1, keepdim=True)
        self._count(known[:, 0], chosen, own)
        return logits, likely.to(weights.dtype), chosen

    @torch.no_grad()
    def _count(self, known: Tensor, chosen: Tensor, own: Tensor) -> None:
        others = (chosen.sort(-1).values != own.sort(-1).values).any(-1)
        found = torch.stack([torch.ones_like(known).sum(), known.sum(), (others & known).sum()])
        self.counts = found if self.counts is None else self.counts + found


class RouterReplay:
    """Makes a model's routers able to replay; every later forward may have `experts=` int16 [S, layers, k] (`UNKNOWN`
    where not known). Raises ValueError for a model whose routers it does not know."""

    def __init__(self, model: PreTrainedModel):
        self.routing: Routing = routing_of(model)
        self._routers = []
        for number, (_, layer, router) in enumerate(routers_of(model)):
            replayed = ReplayedRouter(router)
            router.forward = replayed  # type: ignore[method-assign]
            layer.forward = functools.partial(_told, layer.forward, replayed, number)
            self._routers.append(replayed)

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Since the last call, over all ranks and passes, of the decisions (one per position and layer):
        `router/known`, the share of which the engine's experts were known, and `router/replaced`, the share of these
        for which the learner's routers would have chosen others."""
        counts = [router.counts for router in self._routers if router.counts is not None]
        for router in self._routers:
            router.counts = None
        mine = torch.stack(counts).sum(0).tolist() if counts else [0, 0, 0]
        total, known, replaced = (sum(each) for each in zip(*ranks.gathered(mine), strict=True))
        found = {"router/known": known / total} if total else {}
        return found | ({"router/replaced": replaced / known} if known else {})


def _told(
    forward: Callable[..., Any],
    router: ReplayedRouter,
    number: int,
    *args: Any,
    experts: Tensor | None = None,
    **kw: Any,
) -> Any:
    router.told = None if experts is None else experts[:, number]
    try:
        return forward(*args, **kw)
    finally:
        router.told = None
