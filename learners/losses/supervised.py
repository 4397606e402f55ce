"""Losses on tokens that somebody wrote: no rollouts, no rewards (`areal_like.config.supervision`)."""

from __future__ import annotations

from torch import Tensor

from learners.losses.contract import LossBatch, Observed, current_logprobs, supervised, total


@supervised
def sft(batch: LossBatch, denominator: float) -> tuple[Tensor, Observed]:
    """Cross-entropy, − Σ log π ÷ denominator: supervised fine-tuning. With `normalise: token_mean` its value is the
    mean negative log likelihood per trained token, in nats."""
    likely = current_logprobs(batch)
    return total(likely, batch, denominator), {"nll": -likely.detach()}
