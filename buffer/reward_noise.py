"""What a batch teaches at some group size: the signal-to-noise ratio of its gradient, from gradients and rewards. Pure.

Rewards give the shape. The variance v of rewards within a prompt stands in for the size of the prompt's gradient. For a
choice between right and wrong, v is the gradient of the expected reward. Where v is 0, every policy gradient with a
group's baseline is 0, too. The other choices of an answer share its reward and only add noise: each adds up to a
quarter of variance, times v. With K choices and rewards over a range R, a group of G samples has

    noise / signal² = (E[v²] + (K − 1) · R²/4 · E[v] / (G − 1)) / E[v]²      (means over prompts)

The first term is the noise between prompts, which are assumed to teach different things: the more they differ, the more
prompts a batch needs. The second is the noise within a prompt, including its baseline: the more groups lack variance
because prompts are hard, the more samples a prompt needs.

Gradients give K. The learner measures noise between prompts and within them (`learners.gradient_noise`). K makes the
ratio of the two terms equal to the measured ratio. So K covers what rewards can't show: how many choices share a
reward, which of them share weights, how unlike prompts are. (The total does not give K: gradients of prompts differ by
more than v does. In small learners both terms measured four times what rewards say, at the same K.) Without a
measurement K is set.

The SNR of a batch of P groups is P times a group's signal² / noise. Adam's steps have a set length. While noise is
larger than signal, the part of a step along the true gradient grows as √SNR. So √SNR is the value of a batch.

E[v²] has an unbiased estimate in groups of 4 and more (h-statistics: Halmos 1946, Ann. Math. Statist. 17(1)), so every
size learns from every group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LEAST = 4
"""A group with fewer samples gives no estimate of v²."""
EXPECTED, WEIGHT = 32, 1.0
"""K before any measurement, and its weight as evidence: usually that of two or three batches."""


def moments(rewards: Sequence[float]) -> tuple[float, float]:
    """Unbiased estimates of v and v² from n ≥ 4 rewards of one prompt."""
    n = len(rewards)
    mean = math.fsum(rewards) / n
    m2 = math.fsum((r - mean) ** 2 for r in rewards) / n
    m4 = math.fsum((r - mean) ** 4 for r in rewards) / n
    square = n * ((n * n - 3 * n + 3) * m2 * m2 - (n - 1) * m4) / ((n - 1) * (n - 2) * (n - 3))
    return m2 * n / (n - 1), square


class RewardNoise:
    """Means over groups; evidence fades by `forget` per batch. `seen`: groups so far. `given`: choices per answer
    (None: from the gradients)."""

    def __init__(self, forget: float, given: int | None):
        self.forget, self.given = forget, given
        self.seen = 0
        self.batches = self.scale = self.alike = self.own = 0.0
        self.groups = self.v = self.square = self.dull = 0.0
        self.low, self.high = math.inf, -math.inf

    def note(self, seen: Sequence[Sequence[float]]) -> None:
        """Rewards of each group."""
        enough = [rewards for rewards in seen if len(rewards) >= LEAST]
        if not enough:
            return
        for name in ("groups", "v", "square", "dull"):
            setattr(self, name, self.forget * getattr(self, name))
        for rewards in enough:
            v, square = moments(rewards)
            least, most = min(rewards), max(rewards)
            self.seen += 1
            self.groups += 1
            self.v += v
            self.square += square
            self.dull += most == least
            self.low, self.high = min(self.low, least), max(self.high, most)

    def note_gradient(self, size: int, signal: float, between: float, within: float) -> None:
        """For a batch of groups of `size` samples: the square of the expected gradient, its variance between prompts,
        and that of single samples within a prompt. All are unbiased, so they may be below 0. All have the same unit."""
        alike, own = signal + between, within * (size - 1) / size  # without the baseline's noise
        if size < 2 or self.v <= 0 or not alike or not own:
            return
        self.batches = self.forget * self.batches + 1
        self.scale = self.forget * self.scale + abs(alike) + abs(own)
        shape, each = self._shape()  # as they were for this batch
        usual = self.scale / self.batches  # not its own size, which chance makes larger along with its estimates
        self.alike = self.forget * self.alike + alike / usual * each
        self.own = self.forget * self.own + own / usual * shape

    @property
    def decisions(self) -> float:
        """K: given, or the value that explains the measured noise."""
        if self.given is not None:
            return self.given
        own, alike = self.own + WEIGHT * (EXPECTED - 1), self.alike + WEIGHT
        return 1.0 + max(0.0, own) / max(alike, WEIGHT / 4)

    def _shape(self) -> tuple[float, float]:
        """Noise / signal² between prompts, and within one for each further choice of an answer, times G - 1."""
        v = self.v / self.groups
        return max(1.0, self.square / self.groups / v**2), (self.high - self.low) ** 2 / (4.0 * v)

    @property
    def dull_share(self) -> float:
        """Share of groups whose rewards are all equal."""
        return self.dull / max(1.0, self.groups)

    def noise(self, size: int) -> float:
        """Noise / signal² of a group of `size` samples; 1 if no reward ever differs from another."""
        if self.v <= 0:
            return 1.0
        shape, each = self._shape()
        return shape + (self.decisions - 1) * each / (size - 1)

    def value(self, size: int, groups: int) -> float:
        """√SNR of a batch; 1 if no reward ever differs from another."""
        return math.sqrt(groups / self.noise(size)) if self.v > 0 else 1.0
