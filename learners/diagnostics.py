"""Metrics of a train step, from numbers per token: means and maxima, overall and by staleness.

The learner adds one number per trained token under a name (`TokenTally.add`) for each micro-batch. Until the step is
over, nothing waits for the accelerator. A key `NAME/staleness_2` is NAME over the tokens of that bucket of staleness
(train version − version of the token): 0, 1, 2–3, 4–7 and so on, each named by its lower end.
"""

import numpy as np
import torch
from torch import Tensor

from learners.collectives import Ranks

WITH_MAX = {"ratio", "loss/ratio", "loss/behaviour_weight", "loss/trace_weight"}
"""Names that report `NAME/mean` and `NAME/max`."""
WITH_ESS = {"ratio": "ess", "loss/factor": "loss/factor/ess"}
"""Weights of tokens, which report `NAME/mean`, and the metric of Kish's effective sample size as a share of the tokens.
"""
BUCKETS = 65
"""Buckets that a 64-bit staleness may fall into."""


class TokenTally:
    """Collects the per-token numbers of one train step and turns them into metrics."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def add(self, observed: dict[str, Tensor], staleness: Tensor, prefix: str = "") -> None:
        """`observed`: name → [N], bool or floating point; `staleness` int64 [N]."""
        for name, values in observed.items():
            self._pieces.setdefault(prefix + name, []).append((values.detach(), staleness))

    def _in_host_memory(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Name → values float64 [N], staleness int64 [N]. One copy for all names; added together they share it."""
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
        return {name: (values, stale.astype(np.int64)) for name, (values, stale) in columns.items()}

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        own = self._in_host_memory()
        names = sorted({name for names in ranks.gathered(sorted(own)) for name in names})
        if not names:
            return {}
        sums, most = np.zeros((3, len(names), BUCKETS)), np.full((len(names), BUCKETS), -np.inf)
        for row, name in enumerate(names):
            if name in own:
                values, staleness = own[name]
                bucket = np.where(staleness > 0, 1 + np.floor(np.log2(np.maximum(staleness, 1))), 0).astype(np.int64)
                for power in range(3):
                    sums[power, row] = np.bincount(bucket, values**power, BUCKETS)
                if name in WITH_MAX:
                    np.maximum.at(most[row], bucket, values)
        ranks.sum_tensor(torch.from_numpy(sums))
        ranks.max_tensor(torch.from_numpy(most))
        metrics: dict[str, float] = {}
        for row, name in enumerate(names):
            there = np.flatnonzero(sums[0, row]).tolist()
            parts = {"": slice(None)} | {f"/staleness_{2**at // 2}": slice(at, at + 1) for at in there}
            for suffix, part in parts.items() if there else ():
                count, total, squares = (float(each) for each in sums[:, row, part].sum(-1))
                several = name in WITH_MAX or name in WITH_ESS
                metrics[f"{name}{'/mean' if several else ''}{suffix}"] = total / count
                if name in WITH_MAX:
                    metrics[f"{name}/max{suffix}"] = float(most[row, part].max())
                if name in WITH_ESS:
                    metrics[f"{WITH_ESS[name]}{suffix}"] = total**2 / (count * squares) if squares else 0.0
        return metrics


def drift(log_ratio: Tensor) -> dict[str, Tensor]:
    """How far the policy at the start of the step is from the behaviour policy, per token, from log(start / behaviour)
    [N]. `kl/k1` and `kl/k3` estimate KL(behaviour ‖ policy) (Schulman's estimators); `ratio` is the importance weight
    (`loss/ratio` is the ratio that a loss clips or weighs by; some losses have none)."""
    weight = log_ratio.double().exp()
    return {"kl/k1": -log_ratio, "kl/k3": weight - 1 - log_ratio, "ratio": weight}


def mismatch(log_ratio: np.ndarray, in_flight: np.ndarray) -> dict[str, float]:
    """How far an engine's logprobs are from the learner's under the same weights, from log(learner / engine) [N] of
    tokens of staleness 0: `mismatch_kl` is k3 (KL(behaviour ‖ learner) per token), `mismatch_max` the largest |Δ
    logprob|. Tokens after a weight update within their response (`in_flight` bool [N]) have their own metrics."""
    metrics = {}
    for suffix, members in (("", ~in_flight), ("/in_flight", in_flight)):
        moved = log_ratio[members].astype(np.float64)
        if len(moved):
            metrics[f"mismatch_kl{suffix}"] = float((np.expm1(moved) - moved).mean())
            metrics[f"mismatch_max{suffix}"] = float(np.abs(moved).max())
    return metrics
