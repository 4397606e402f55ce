"""Consecutive gradients: how alike they are, and a bound on it (after GAC, arXiv 2603.01501).

In synchronous training, consecutive policy gradients are nearly orthogonal. In asynchronous training their cosine stays
high, and steps overshoot along the shared direction. GAC regulates the progress along that direction by projection. We
know this from its abstract; we have not seen its thresholds and regimes. So this is our reconstruction: the part of a
gradient along the previous one is shortened until their cosine is the bound. The rest does not change.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from learners.collectives import Ranks


class Alignment:
    """Bounds the cosine between a gradient and the previous one, which is taken before its own projection.

    `cap` in (0, 1]; 1 only measures. Keeping the previous gradient costs the memory of one more gradient. `cosines`
    belong to the train step; `take` empties them.
    """

    def __init__(self, cap: float, ranks: Ranks):
        if not 0.0 < cap <= 1.0:
            raise ValueError(f"grad_cosine_cap must lie in (0, 1], got {cap}")
        self._cap, self._ranks = cap, ranks
        self._before: Tensor | None = None
        self._cosines: list[float] = []
        self._cut = 0

    @torch.no_grad()
    def bound(self, gradient: Tensor, norm: float) -> float:
        """Change this rank's flat part of the gradient, if needed. `norm`: of the whole, finite. Returns the new
        norm."""
        before, self._before = self._before, gradient.clone()
        length = self._ranks.norm(before) if before is not None else 0.0
        if before is None or not (norm and length):
            return norm
        along = self._ranks.sum(torch.dot(gradient.double(), before.double()).item()) / length
        self._cosines.append(along / norm)
        if self._cap == 1.0 or along <= self._cap * norm:
            return norm
        self._cut += 1
        across = math.sqrt(max(0.0, norm**2 - along**2))
        wanted = self._cap * across / math.sqrt(1.0 - self._cap**2)
        gradient.add_(before, alpha=(wanted - along) / length)
        return math.hypot(wanted, across)

    def take(self) -> dict[str, float]:
        """Metrics of the optimizer steps since the last call: `grad_cosine`, and `grad_cosine_cut`, the share of the
        gradients that were changed."""
        cosines, cut, self._cosines, self._cut = self._cosines, self._cut, [], 0
        if not cosines:
            return {}
        return {"grad_cosine": sum(cosines) / len(cosines), "grad_cosine_cut": cut / len(cosines)}

    def state_dict(self) -> dict[str, Any]:
        return {} if self._before is None else {"gradient_before": self._before.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = state.get("gradient_before")
        self._before = None if before is None else before.clone()
