"""Consecutive gradients: how alike they are, and a bound on it (after GAC, arXiv 2603.01501).

Asynchronous training shows a persistently high cosine between consecutive policy gradients where synchronous training
has nearly orthogonal ones, and overshoots along what they share. GAC regulates the progress along that direction by
projection. Its abstract says so much; its thresholds and regimes we have not seen. So this is our reconstruction: the
part of a gradient along the one before is shortened until their cosine is the bound; the rest stays as it is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from learners.collectives import Ranks


class Alignment:
    """Bounds the cosine between a gradient and the one before it, as that was before its own projection.

    `cap` in (0, 1]; 1 only measures. The gradient before is one more copy of it in memory. `cosines` are those of the
    train step, `take` empties them.
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
        """Change this rank's part of the gradient, flat, if need be; `norm` is that of the whole one, finite. Returns
        the new norm."""
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
