"""Metrics of a train step, from numbers per token: means, maxima and quantiles, overall and by staleness.

The learner adds one number per trained token under a name (`TokenTally.add`) for each micro-batch. Until the step is
over, nothing is computed and nothing waits for the accelerator. A key `NAME/staleness_2` is NAME over the tokens of
that bucket of staleness (train version − version of the token): buckets are 0, 1, 2–3, 4–7, 8–15 and so on, each named
by its lower end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from areal_like.types import Batch
from learners.advantages import varied
from learners.collectives import Ranks
from learners.losses.contract import LOG_RATIO_LIMIT

PEAKED = {"loss/ratio", "loss/behaviour_weight", "loss/trace_weight"}
"""Names that also report their maximum: `NAME/mean` and `NAME/max`."""
FACTOR, SQUARES = "loss/factor", "loss/factor, squared"
"""A factor of a token's objective, and its square: reported as `NAME/mean` and `NAME/ess`, Kish's effective sample size
as a share of the tokens."""
SPREAD = {"loss/gate"}
"""Names that report `NAME/mean` and quantiles, for tokens with positive and with negative advantage."""
BUCKETS = 65
"""Buckets that a 64-bit staleness may fall into."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def buckets(staleness: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(suffix, members bool [N]) for each bucket of staleness (int [N], not negative) that has members."""
    lower = np.where(staleness > 0, 2 ** np.floor(np.log2(np.maximum(staleness, 1))), 0).astype(int)
    for low in np.unique(lower):
        yield f"/staleness_{low}", lower == low


@dataclass
class TokenTally:
    """Collects the per-token numbers of one train step and turns them into metrics."""

    _pieces: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = field(default_factory=dict)
    _reduced: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)
    """Name → sum, number and maximum over all ranks of the values in each bucket, [BUCKETS] each."""

    def add(self, observed: dict[str, Tensor], staleness: Tensor, advantages: Tensor, prefix: str = "") -> None:
        """`observed`: name → [N], bool or floating point; `staleness` int64 [N]; `advantages` [N]."""
        for name, values in observed.items():
            self._pieces.setdefault(prefix + name, []).append((values.detach(), staleness, advantages))
            if prefix + name == FACTOR:
                self._pieces.setdefault(SQUARES, []).append((values.detach().square(), staleness, advantages))

    def merge(self, ranks: Ranks) -> None:
        """Combine the ranks' observations of their own tokens. Most names need only sums and maxima; names with
        quantiles need all tokens' numbers."""
        if ranks.count == 1:
            return
        own = self._in_host_memory()
        gathered = ranks.gathered([sorted(own), {name: columns for name, columns in own.items() if name in SPREAD}])
        self._pieces = {}
        for _, spread in gathered:
            for name, columns in spread.items():
                values, staleness, advantages = (torch.from_numpy(column) for column in columns)
                self._pieces.setdefault(name, []).append((values, staleness, advantages))
        self._reduced = _reduced(own, sorted({name for names, _ in gathered for name in names} - SPREAD), ranks)

    def _in_host_memory(self) -> dict[str, list[np.ndarray]]:
        """Name → values float64 [N], staleness int64 [N], advantages float64 [N]. One copy for all names: names that
        were added together share two of the three."""
        known = {id(part): part for pieces in self._pieces.values() for piece in pieces for part in piece}
        if not known:
            return {}
        every = torch.cat([part.flatten().double() for part in known.values()]).cpu().numpy()
        ends = np.cumsum([part.numel() for part in known.values()])[:-1]
        found = dict(zip(known, np.split(every, ends), strict=True))
        columns = {
            name: [np.concatenate([found[id(part)] for part in column]) for column in zip(*pieces, strict=True)]
            for name, pieces in self._pieces.items()
        }
        return {name: [values, stale.astype(np.int64), gains] for name, (values, stale, gains) in columns.items()}

    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, table in self._reduced.items():
            metrics |= _of_reduced(name, *table)
        for name, (values, staleness, advantages) in self._in_host_memory().items():
            if not len(values):
                continue
            for suffix, members in [("", np.ones(len(values), bool)), *buckets(staleness)]:
                metrics |= {
                    f"{key}{suffix}": value for key, value in _of(name, values[members], advantages[members]).items()
                }
        for name in [name for name in metrics if name.startswith(SQUARES)]:
            suffix, squares = name.removeprefix(SQUARES), metrics.pop(name)
            mean = metrics[f"{FACTOR}/mean{suffix}"] = metrics.pop(f"{FACTOR}{suffix}")
            metrics[f"{FACTOR}/ess{suffix}"] = mean**2 / squares if squares else 0.0
        return metrics


def _reduced(
    own: dict[str, list[np.ndarray]], names: list[str], ranks: Ranks
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """`TokenTally._reduced` of these names, from this rank's values and staleness of some of them."""
    sums, counts = np.zeros((2, len(names), BUCKETS))
    most = np.full((len(names), BUCKETS), -np.inf)
    for row, name in enumerate(names):
        if name in own:
            values, staleness, _ = own[name]
            bucket = np.where(staleness > 0, 1 + np.floor(np.log2(np.maximum(staleness, 1))), 0).astype(int)
            sums[row] = np.bincount(bucket, values.astype(np.float64), BUCKETS)
            counts[row] = np.bincount(bucket, minlength=BUCKETS)
            np.maximum.at(most[row], bucket, values.astype(np.float64))
    if not names:
        return {}
    ranks.sum_tensor(torch.from_numpy(sums))
    ranks.sum_tensor(torch.from_numpy(counts))
    ranks.max_tensor(torch.from_numpy(most))
    return {name: (sums[row], counts[row], most[row]) for row, name in enumerate(names)}


def _of_reduced(name: str, sums: np.ndarray, counts: np.ndarray, most: np.ndarray) -> dict[str, float]:
    """Metrics, as of `_of`, overall and of each bucket."""
    found = {f"/staleness_{2 ** (i - 1) if i else 0}": slice(i, i + 1) for i in np.flatnonzero(counts).tolist()}
    metrics: dict[str, float] = {}
    for suffix, some in ({"": slice(None)} | found).items() if found else ():
        mean = float(sums[some].sum() / counts[some].sum())
        if name in PEAKED:
            metrics |= {f"{name}/mean{suffix}": mean, f"{name}/max{suffix}": float(most[some].max())}
        else:
            metrics[f"{name}{suffix}"] = mean
    return metrics


def _of(name: str, values: np.ndarray, advantages: np.ndarray) -> dict[str, float]:
    if name in PEAKED:
        return {f"{name}/mean": float(values.mean()), f"{name}/max": float(values.max())}
    if name not in SPREAD:
        return {name: float(values.mean())}
    metrics = {f"{name}/mean": float(values.mean())}
    for sign, members in (("positive", advantages > 0), ("negative", advantages < 0)):
        if members.any():
            metrics[f"{name}/{sign}/mean"] = float(values[members].mean())
            for q, value in zip(QUANTILES, np.quantile(values[members], QUANTILES), strict=True):
                metrics[f"{name}/{sign}/p{round(100 * q):02d}"] = float(value)
    return metrics


def drift(log_ratio: np.ndarray, staleness: np.ndarray, sample: np.ndarray) -> dict[str, float]:
    """How far the policy at the start of the step (log start/behaviour of tokens, [N]) is from the behaviour policy.

    `kl/k1` and `kl/k3` estimate KL(behaviour ‖ policy) per token (Schulman's estimators). `ess` is Kish's effective
    sample size of the importance weights as a share of the tokens, `chi2` their χ² divergence, mean of w² − 1.
    `ratio/mean` and `ratio/max` are of these weights (`loss/ratio` is the ratio that a loss clips or weighs by; some
    losses have none). `sequence/ess` and `sequence/chi2` use the products over each sample's tokens, within e^±20. All
    come overall and by staleness; a sample has the staleness of its oldest token.
    """
    metrics: dict[str, float] = {}
    if not len(log_ratio):
        return metrics
    moved = log_ratio.astype(np.float64)
    weight = np.exp(moved)
    for suffix, members in [("", np.ones(len(weight), bool)), *buckets(staleness)]:
        w, d = weight[members], moved[members]
        metrics[f"kl/k1{suffix}"] = float(-d.mean())
        metrics[f"kl/k3{suffix}"] = float((w - 1 - d).mean())
        metrics |= {f"ratio/mean{suffix}": float(w.mean()), f"ratio/max{suffix}": float(w.max())}
        metrics |= _spread(w, "", suffix)
    there, place = np.unique(sample, return_inverse=True)
    products = np.exp(np.clip(np.bincount(place, moved), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    oldest = np.zeros(len(there), np.int64)
    np.maximum.at(oldest, place, staleness)
    for suffix, members in [("", np.ones(len(there), bool)), *buckets(oldest)]:
        metrics |= _spread(products[members], "sequence/", suffix)
    return metrics


def _spread(weights: np.ndarray, prefix: str, suffix: str) -> dict[str, float]:
    """ESS and χ² of importance weights."""
    squares = float((weights**2).mean())
    ess = float(weights.mean()) ** 2 / squares
    return {f"{prefix}ess{suffix}": ess, f"{prefix}chi2{suffix}": squares - 1.0}


def zero_variance_by_staleness(batch: Batch) -> dict[str, float]:
    """`zero_variance_share` of the groups whose oldest token falls into each bucket of staleness."""
    rewards = np.array([s.reward for s in batch.samples], np.float64)
    member = np.repeat(np.arange(len(batch.groups)), [len(g.samples) for g in batch.groups])
    equal = ~varied(rewards, member)
    staleness = np.array([batch.version - g.oldest_version for g in batch.groups])
    return {f"zero_variance_share{suffix}": float(equal[members].mean()) for suffix, members in buckets(staleness)}


def mismatch(log_ratio: np.ndarray, in_flight: np.ndarray) -> dict[str, float]:
    """How far an engine's logprobs are from the learner's under the same weights, from log(learner / engine) [N] of
    tokens of staleness 0. `mismatch_kl` is k3 (Schulman's estimator of KL(behaviour ‖ learner), per token),
    `mismatch_max` the largest |Δ logprob|. Tokens after a weight update within their response (`in_flight` bool [N])
    have their own metrics: an engine that keeps the KV cache of older weights adds to the difference."""
    metrics = {}
    for suffix, members in (("", ~in_flight), ("/in_flight", in_flight)):
        moved = log_ratio[members].astype(np.float64)
        if len(moved):
            metrics[f"mismatch_kl{suffix}"] = float((np.expm1(moved) - moved).mean())
            metrics[f"mismatch_max{suffix}"] = float(np.abs(moved).max())
    return metrics
