"""How much of a gradient is noise, between prompts and within them.

A sample's part of the gradient is m + (its prompt's deviation, of variance τ²) + (its own, of variance ω²), variances
summed over all weights. So of two different samples' parts the product is |m|² + τ² for samples of one prompt and |m|²
for others, and a part's square is |m|² + τ² + ω², each expected. A minibatch's gradient is accumulated in three parts,
and their products give all three without a bias. With squares alone (the gradient noise scale of McCandlish et al.,
arXiv 1812.06162, appendix A.1) the same needs four times the batches. Samples of a group share a baseline, which we
neglect: it changes the products of two samples' parts by a share of about 1/G².

Products are taken of a million weights drawn at random, so that three copies of a gradient need no memory to speak of.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from learners.collectives import Ranks

DRAWN = 1 << 20
"""Weights of a rank."""


class Cut:
    """A minibatch's samples (int [n], group by group) in three `parts`, one behind the other: half of the samples of
    half of the groups, drawn by `seed`; the others of these; all other groups. One part, if groups differ in size or
    have one sample, or if there is one group. `groups` int: the group of each sample of the batch."""

    def __init__(self, samples: np.ndarray, groups: np.ndarray, seed: tuple[int, int]):
        _, counts = np.unique(groups[samples], return_counts=True)
        self.groups, self.size = len(counts), int(counts[0])
        self.some, self.few = self.groups // 2, self.size // 2
        self.parts = [samples]
        if self.some and self.few and counts.min() == counts.max():
            table = samples.reshape(self.groups, self.size)
            mixed = np.random.default_rng(seed).permuted(table[: self.some], axis=1)
            parts = (mixed[:, : self.few], mixed[:, self.few :], table[self.some :])
            self.parts = [np.sort(part, axis=1).reshape(-1) for part in parts]

    def estimates(self, products: np.ndarray) -> tuple[float, float, float]:
        """|m|², τ² and ω², times the square of the number of samples, from the products [3, 3] of the parts'
        gradients."""
        p, g, few, others = self.some, self.size, self.few, self.groups - self.some
        expected = products[:2, 2].sum() / (p * g * others * g)
        between = products[0, 1] / (p * few * (g - few)) - p * expected
        square = products[:2, :2].sum() + products[2, 2]
        within = (square - (p**2 + others**2) * g**2 * expected) / (self.groups * g) - g * between
        each = (self.groups * g) ** 2
        return float(each * expected), float(each * between), float(each * within)


class Drawn:
    """The same weights of every gradient, of this rank's part of `size`."""

    def __init__(self, size: int, seed: int, ranks: Ranks):
        dice = torch.Generator().manual_seed(seed)
        self._places = torch.randint(size, (DRAWN,), generator=dice) if size > DRAWN else None
        self._times, self._ranks = max(1.0, size / DRAWN), ranks

    def of(self, gradient: Tensor) -> Tensor:
        """float [k], a copy."""
        if self._places is None:
            return gradient.clone()
        self._places = self._places.to(gradient.device)  # once
        return gradient[self._places]

    def products(self, sums: Sequence[Tensor]) -> np.ndarray:
        """Products of the parts [n, n], over all ranks, from what was drawn of the sums of the first 1, 2, ... n."""
        parts = torch.stack(list(sums)).double().diff(dim=0, prepend=torch.zeros_like(sums[0]).double()[None])
        found = self._times * (parts @ parts.T).cpu()
        self._ranks.sum_tensor(found)
        return found.numpy()


class GradientNoise:
    """The estimates of a train step's minibatches."""

    def __init__(self) -> None:
        self._found: list[tuple[float, float, float]] = []

    def note(self, cut: Cut, products: np.ndarray) -> None:
        if np.isfinite(products).all():
            self._found.append(cut.estimates(products))

    def metrics(self) -> dict[str, float]:
        """`gradient/signal`: the square of the expected gradient. `gradient/between`: the variance of a prompt's
        gradient; `gradient/within`: that of a sample's around its prompt's. A minibatch of P groups of G samples has
        noise of between / P + within / (P · G). A single step may say less than 0: average each over steps before you
        divide."""
        if not self._found:
            return {}
        names = ("gradient/signal", "gradient/between", "gradient/within")
        return dict(zip(names, np.mean(self._found, axis=0).tolist(), strict=True))
