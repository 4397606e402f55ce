"""Losses with the plain policy gradient `w A ∇log π`; they differ in the importance weight w, which has no gradient.
The reported value is `− Σ w A log π ÷ denominator`: only its gradient has a meaning, as with every score function.
`sft` is the same with A = 1."""

from torch import Tensor

from learners.losses.contract import LossBatch, Observed, current_logprobs, score_loss, total


def reinforce(batch: LossBatch, denominator: float) -> tuple[Tensor, Observed]:
    """REINFORCE (Williams 1992): w = 1. `loss=is_pg` is this with the correction `exact` (Precup et al. 2000): w = Π
    current/behaviour over the sequence, whose variance grows exponentially with its length. `loss=tis`: the token's
    ratio, truncated (Ionides 2008; in LLM training Yao et al. 2025). `loss=cispo` (MiniMax-M1, arXiv 2506.13585):
    clipped at 1.28, without a lower bound; the paper tunes its upper bound without giving it, and later work uses
    anything up to 7 (ScaleRL, arXiv 2510.13786)."""
    return score_loss(batch.advantages, batch, denominator), {}


def sft(batch: LossBatch, denominator: float) -> tuple[Tensor, Observed]:
    """Cross-entropy, − Σ log π ÷ denominator, without advantages: rejection sampling, where rewards that are None leave
    out all but good samples. With `normalise: token_mean` its value is the mean negative log likelihood per trained
    token, in nats."""
    likely = current_logprobs(batch)
    return total(likely, batch, denominator), {"nll": -likely.detach()}
