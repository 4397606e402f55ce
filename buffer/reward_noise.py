"""What a batch of groups of some size teaches: the signal-to-noise ratio of its gradient, told from rewards. Pure.

The buffer sees no gradients. The variance v of rewards within a prompt stands in for the prompt's gradient: for a
policy of one parameter per prompt, a softmax over right and wrong, it is the gradient of the expected reward; and where
v is 0 every policy gradient with a group's baseline is 0. A group of G samples estimates it by their sample variance,
with the noise D + W(G): D = Var_i(v_i) over prompts (few prompts are a poor sample of all), and within a prompt
W(G) = E_i[mu4_i − v_i² (G − 3) / (G − 1)] / G (few samples are a poor sample of one). mu4: the fourth central moment. A
group whose rewards are all equal says 0, so the more of these there are, the more a batch needs many prompts.

A batch of P groups then has SNR(G) = P · E[v]² / (D + W(G)). Adam takes steps of a set length, of which the part along
the true gradient grows as √SNR while noise is larger than signal, as it is in RL: √SNR is the value of a batch.

D and W follow from E[v], E[v²] and E[mu4], which have unbiased estimates in groups of any size from 4 on (h-statistics:
Halmos 1946, Ann. Math. Statist. 17(1)). So every size learns from every group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LEAST = 4
"""Samples of a group without which it says nothing of its fourth moment."""


def moments(rewards: Sequence[float]) -> tuple[float, float, float]:
    """Unbiased estimates of v, v² and mu4 from n ≥ 4 rewards of one prompt."""
    n = len(rewards)
    mean = math.fsum(rewards) / n
    m2 = math.fsum((r - mean) ** 2 for r in rewards) / n
    m4 = math.fsum((r - mean) ** 4 for r in rewards) / n
    whole = n / ((n - 1) * (n - 2) * (n - 3))
    square = whole * ((n * n - 3 * n + 3) * m2 * m2 - (n - 1) * m4)
    fourth = whole * ((n * n - 2 * n + 3) * m4 - 3 * (2 * n - 3) * m2 * m2)
    return m2 * n / (n - 1), square, fourth


class RewardNoise:
    """Means of the three over groups; evidence fades by `forget` per batch. `seen`: groups so far."""

    def __init__(self, forget: float):
        self.forget = forget
        self.seen = 0
        self.groups = self.v = self.square = self.fourth = self.dull = 0.0

    def note(self, seen: Sequence[Sequence[float]]) -> None:
        """Rewards of each group."""
        enough = [rewards for rewards in seen if len(rewards) >= LEAST]
        if not enough:
            return
        for name in ("groups", "v", "square", "fourth", "dull"):
            setattr(self, name, self.forget * getattr(self, name))
        for rewards in enough:
            v, square, fourth = moments(rewards)
            self.seen += 1
            self.groups += 1
            self.v += v
            self.square += square
            self.fourth += fourth
            self.dull += max(rewards) == min(rewards)

    @property
    def dull_share(self) -> float:
        """Share of groups whose rewards are all equal."""
        return self.dull / max(1.0, self.groups)

    def noise(self, size: int) -> float:
        """Variance of what one group of `size` samples says, over E[v]². 1 if no reward ever differs from another."""
        if self.v <= 0:
            return 1.0
        v = self.v / self.groups
        square = max(self.square / self.groups, v * v)
        fourth = max(self.fourth / self.groups, square)
        return (square - v * v + (fourth - square * (size - 3) / (size - 1)) / size) / (v * v)

    def value(self, size: int, groups: int) -> float:
        """√SNR of a batch."""
        return math.sqrt(groups / self.noise(size)) if self.v > 0 else 1.0
