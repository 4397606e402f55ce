"""How much of a gradient is noise, between prompts and within them.

A sample's gradient is m + (its prompt's deviation, of variance τ²) + (its own deviation, of variance ω²), with
variances summed over all weights. The product of two samples' gradients is expected to be |m|² + τ² if they share a
prompt, else |m|². The square of one sample's gradient is expected to be |m|² + τ² + ω². A minibatch's gradient is
accumulated in three parts, and the products of these parts give |m|², τ² and ω² without bias. With squares alone (the
gradient noise scale of McCandlish et al., arXiv 1812.06162, appendix A.1) the same needs four times the batches.
Samples of a group share a baseline, which we neglect: it changes the products of two samples' gradients by a share of
about 1/G².

The products use a million weights drawn at random, so that three copies of a gradient need little memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from learners.collectives import Ranks

DRAWN = 1 << 20
"""Weights drawn on each rank."""
EVERY = 6
"""If a stream comes piece by piece, every sixth piece is cut. It costs two passes (three, if it has several groups)
instead of one. Estimates are means over steps, so they come later, but are no worse."""
OTHERS = 2
"""The index of the part with whole groups."""


class Cut:
    """Divides samples (int [n], group by group) into three `parts`. The first groups are halved, by `seed`: the first
    part has one half of each, the second part the other half. The third part has all samples of the other groups.
    `halved`: the share of groups that are halved. If groups differ in size or have one sample, all are in the third
    part. `groups` int: the group of each sample of the batch."""

    def __init__(self, samples: np.ndarray, groups: np.ndarray, seed: tuple[int, ...], halved: float = 0.5):
        _, counts = np.unique(groups[samples], return_counts=True)
        self.groups, self.size = len(counts), int(counts.max(initial=0))
        self.is_even = counts.min(initial=self.size) == self.size > 1
        self.some = int(halved * self.groups) if self.is_even else 0
        cut, few = self.some * self.size, self.size // 2
        mixed = np.random.default_rng(seed).permuted(samples[:cut].reshape(self.some, self.size), axis=1)
        halves = [np.sort(half, axis=1).reshape(-1) for half in (mixed[:, :few], mixed[:, few:])]
        self.parts = [*halves, samples[cut:]]


def estimates(products: np.ndarray, some: int, groups: int, size: int) -> tuple[float, float, float]:
    """|m|², τ² and ω², times the square of the number of samples, from the products [3, 3] of the gradients of a
    `Cut`'s parts. It has `groups` groups of `size` samples; `some` of the groups are halved."""
    p, g, few, others = some, size, size // 2, groups - some
    expected = products[:2, 2].sum() / (p * g * others * g)
    between = products[0, 1] / (p * few * (g - few)) - p * expected
    square = products[:2, :2].sum() + products[2, 2]
    within = (square - (p**2 + others**2) * g**2 * expected) / (groups * g) - g * between
    each = (groups * g) ** 2
    return float(each * expected), float(each * between), float(each * within)


class DrawnWeights:
    """Draws the same weights from every gradient: from this rank's part, which has `size` weights."""

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

    def products(self, parts: Sequence[Tensor]) -> np.ndarray:
        """Products of the parts' gradients [n, n], over all ranks, estimated from the drawn weights."""
        stacked = torch.stack(list(parts))
        found = self._times * (stacked @ stacked.T).cpu()
        self._ranks.sum_tensor(found)
        return found.numpy()


class Parts:
    """The drawn weights of the gradients of a minibatch's three parts, recorded while the minibatch is accumulated. If
    the learner streams, it comes piece by piece, and each piece has its own `Cut`. Every `EVERY`th piece has half of
    its groups halved, or its only group."""

    def __init__(self, drawn: DrawnWeights):
        self._drawn = drawn
        self.restart()

    def restart(self) -> None:
        """The gradient is 0 again."""
        self._before: Tensor | None = None
        self._halves: dict[int, Tensor] = {}
        self._cuts: list[Cut] = []

    def cut(
        self, samples: np.ndarray, groups: np.ndarray, seed: tuple[int, int], gradient: Tensor, *, piece: int | None
    ) -> Cut:
        """The samples to be added to `gradient` next. `piece`: the number in the batch (None: a whole minibatch)."""
        if piece is None:
            cut = Cut(samples, groups, seed)
        else:  # a piece of several groups may be all of the batch, and has all three parts
            several = len(np.unique(groups[samples])) > 1
            cut = Cut(samples, groups, (*seed, piece), halved=0.0 if piece % EVERY else 0.5 if several else 1.0)
        if cut.some:
            self._before = self._drawn.of(gradient).double() if self._cuts else None
        self._cuts.append(cut)
        return cut

    def note(self, part: int, gradient: Tensor) -> None:
        """`gradient` is the sum since `restart`; the newest addition is this part's."""
        if part == OTHERS:  # what the halves leave of the whole, at the end: a copy less for each piece
            return
        now = self._drawn.of(gradient).double()
        new = now if self._before is None else now - self._before
        self._halves[part] = self._halves[part] + new if part in self._halves else new
        self._before = now

    def tell(self, noise: NoiseEstimates, gradient: Tensor, denominator: float = 1.0) -> None:
        """Make an estimate if the parts allow it. The gradient is not yet divided by the denominator."""
        some, groups = sum(cut.some for cut in self._cuts), sum(cut.groups for cut in self._cuts)
        even = all(cut.is_even for cut in self._cuts) and len({cut.size for cut in self._cuts}) == 1
        if even and 0 < some < groups:
            few, rest = self._halves[0], self._halves[1]
            others = self._drawn.of(gradient).double() - few - rest
            products = self._drawn.products([few, rest, others]) / denominator**2
            noise.note(products, some, groups, self._cuts[0].size)


class NoiseEstimates:
    """The estimates of a train step's minibatches."""

    def __init__(self) -> None:
        self._found: list[tuple[float, float, float]] = []

    def note(self, products: np.ndarray, some: int, groups: int, size: int) -> None:
        """The arguments are those of `estimates`."""
        if np.isfinite(products).all():
            self._found.append(estimates(products, some, groups, size))

    def metrics(self) -> dict[str, float]:
        """`gradient/signal`: the square of the expected gradient. `gradient/between`: the variance of a prompt's
        gradient; `gradient/within`: the variance of a sample's gradient around its prompt's. A minibatch of P groups of
        G samples has noise of between / P + within / (P · G). A single step's estimate may be below 0: average each
        over steps before you divide."""
        if not self._found:
            return {}
        names = ("gradient/signal", "gradient/between", "gradient/within")
        return dict(zip(names, np.mean(self._found, axis=0).tolist(), strict=True))
