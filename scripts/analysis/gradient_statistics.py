"""Statistics of the gradients of several losses on the same batches: how similar they are, and how they vary.

Takes batches one by one (`add`) and keeps one summed gradient per loss and bucket of staleness, never those of all
batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .intervals import Estimate, bootstrap, markdown_table

PER_BATCH = ("norm", "ess", "weight", "active")


@dataclass
class Tally:
    """One loss in one bucket ("" for all): values so far, one entry per batch with tokens there."""

    total: Any = 0.0
    squares: float = 0.0
    tokens: int = 0
    series: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PER_BATCH})

    def add(self, score: Any) -> None:
        gradient = score.gradient.double().numpy()
        norm = float(np.linalg.norm(gradient))
        self.total = self.total + gradient
        self.squares += norm**2
        self.tokens += score.tokens
        for name, value in zip(PER_BATCH, (norm, score.ess, score.weight, score.active), strict=True):
            self.series[name].append(value)

    def numbers(self) -> dict[str, Any]:
        """Estimates of `PER_BATCH`; `variance` of the gradient over batches (the trace of its covariance), and `noise`,
        the same over the squared norm of the mean gradient: the number of batches to average before the mean shows."""
        count = len(self.series["norm"])
        mean_square = float(np.sum(np.square(self.total / count)))
        variance = max(0.0, (self.squares - count * mean_square) / (count - 1)) if count > 1 else math.nan
        noise = variance / mean_square if mean_square else math.nan
        estimates = {name: bootstrap(values) for name, values in self.series.items()}
        return {**estimates, "variance": variance, "noise": noise, "tokens": self.tokens, "batches": count}


class GradientStatistics:
    """`losses` in the order of display."""

    def __init__(self, losses: Sequence[str]):
        self.losses, self.batches = list(losses), 0
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._cosines: dict[str, list[np.ndarray]] = {}

    def add(self, scores: Mapping[str, Mapping[str, Any]]) -> None:
        """The scores of one batch: loss → bucket → `learners.scoring.Score`."""
        self.batches += 1
        for bucket in scores[self.losses[0]]:
            for loss in self.losses:
                self._tallies.setdefault((loss, bucket), Tally()).add(scores[loss][bucket])
            gradients = np.stack([scores[loss][bucket].gradient.double().numpy() for loss in self.losses])
            self._cosines.setdefault(bucket, []).append(cosines(gradients))

    @property
    def buckets(self) -> list[str]:
        """ "" first, then by staleness."""
        return sorted(self._cosines, key=lambda bucket: _lower(bucket))

    def numbers(self, loss: str, bucket: str = "") -> dict[str, Any]:
        """See `Tally.numbers`. Raises KeyError."""
        return self._tallies[loss, bucket].numbers()

    def cosine(self, bucket: str = "") -> np.ndarray:
        """The mean over batches of the cosines between the losses' gradients: [losses, losses]; NaN if one of the
        two was 0 in every batch."""
        stacked = np.stack(self._cosines[bucket])
        known = ~np.isnan(stacked)
        sums, counts = np.where(known, stacked, 0.0).sum(0), known.sum(0)
        return np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)

    def as_data(self) -> dict[str, Any]:
        """For JSON: `cosine` by bucket, and `by_loss` → loss → bucket → numbers."""
        by_loss: dict[str, dict[str, Any]] = {}
        for loss in self.losses:
            for bucket in self.buckets:
                numbers = self.numbers(loss, bucket)
                plain = {key: asdict(value) if isinstance(value, Estimate) else value for key, value in numbers.items()}
                by_loss.setdefault(loss, {})[title(bucket)] = plain
        return {"cosine": {title(bucket): self.cosine(bucket).tolist() for bucket in self.buckets}, "by_loss": by_loss}


def cosines(vectors: np.ndarray) -> np.ndarray:
    """Cosines between the rows of [n, size]: [n, n], NaN for a row of zeros."""
    norms = np.linalg.norm(vectors, axis=1)
    products = vectors @ vectors.T
    scale = np.outer(norms, norms)
    return np.divide(products, scale, out=np.full(products.shape, np.nan), where=scale > 0).clip(-1.0, 1.0)


def _lower(bucket: str) -> int:
    return int(bucket.rpartition("_")[2]) if bucket else -1


def title(bucket: str) -> str:
    """`staleness 2–3`; `all` for the bucket of all tokens."""
    low = _lower(bucket)
    if low < 0:
        return "all"
    return f"staleness {low}" if low < 2 else f"staleness {low}–{2 * low - 1}"


def summarise(statistics: GradientStatistics) -> str:
    """Markdown: a table of all tokens, one by staleness, the matrix of cosines."""
    header = ["norm", "variance", "noise", "ess", "weight", "active"]
    overall = [[loss, *(statistics.numbers(loss)[name] for name in header)] for loss in statistics.losses]
    parts = [markdown_table(["loss", *header], overall)]
    buckets = [bucket for bucket in statistics.buckets if bucket]
    rows = [
        [loss, title(bucket).removeprefix("staleness "), *(numbers[name] for name in ("tokens", *header))]
        for loss in statistics.losses
        for bucket in buckets
        for numbers in [statistics.numbers(loss, bucket)]
    ]
    parts.append(markdown_table(["loss", "staleness", "tokens", *header], rows))
    matrix = [
        [loss, *("-" if math.isnan(value) else f"{value:.2f}" for value in row)]
        for loss, row in zip(statistics.losses, statistics.cosine(), strict=True)
    ]
    parts.append(markdown_table(["cosine", *statistics.losses], matrix))
    return "\n".join(parts)
