"""Terms for any loss: KL to a reference, and the penalty on overlong answers. Pure functions.

The learner takes the KL's gradient (`kl_loss`), subtracts the KL from the reward (`kl_reward`), or both. It subtracts
the penalty on length from the reward.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from learners.losses.contract import IMPOSSIBLE, LOG_RATIO_LIMIT

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(policy: Tensor, reference: Tensor, estimator: str, cut: float | None = None) -> Tensor:
    """Per-token estimates [N] of KL(policy ‖ reference) from logprobs [N] of tokens that the policy sampled, in nats.

    Schulman's (joschu.net/blog/kl-approx.html), with d = log policy − log reference within ±20: k1 = d (unbiased, may
    be negative); k2 = d²/2; k3 = exp(−d) − 1 + d (unbiased, never negative; GRPO's, arXiv 2402.03300).

    As losses they have other gradients (arXiv 2506.09477): k2's is the KL's own; k1's is zero on average and trains
    nothing; k3's is the KL's gradient to first order near the reference. Raises ValueError for another name.

    Estimates are cut at ± `cut`, where they have no gradient (verl cuts its k3 at 10).
    """
    difference = policy.clamp(min=IMPOSSIBLE) - reference.clamp(min=IMPOSSIBLE)
    difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match estimator:
        case "k1":
            estimate = difference
        case "k2":
            estimate = 0.5 * difference**2
        case "k3":
            estimate = torch.exp(-difference) - 1.0 + difference
        case _:
            raise ValueError(f"a KL estimator is k1, k2 or k3, got {estimator!r}")
    return estimate if cut is None else estimate.clamp(-cut, cut)


def overlong_penalty(lengths: np.ndarray, *, limit: int, buffer: int) -> np.ndarray:
    """DAPO's soft punishment of length (arXiv 2503.14476, equation 13), to subtract from the reward: [n], 0 to 1.

    `lengths` [n] response tokens. 0 up to `limit` − `buffer`, then linear, 1 from `limit` on. Without a buffer it is a
    step at `limit`, which is the length of an answer that was cut there.
    """
    over = np.asarray(lengths, np.float64) - (limit - buffer)
    return np.clip(over / buffer, 0.0, 1.0) if buffer else (over >= 0).astype(np.float64)
