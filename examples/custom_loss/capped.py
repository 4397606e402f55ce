"""A loss of your own: a policy gradient whose importance weights are cut. Rules: `learners/losses/contract.py`."""

from typing import Annotated

from torch import Tensor

from learners.losses.contract import LossBatch, Observed, ratio, score_loss


def capped(batch: LossBatch, denominator: float, *, cap: Annotated[float, "(0, inf)"] = 2.0) -> tuple[Tensor, Observed]:
    """`− Σ min(current/behaviour, cap) · A · log π ÷ denominator`; `cap` is a knob of the config."""
    weight = ratio(batch.current, batch.behaviour, batch.mask).detach().clamp(max=cap)
    return score_loss(weight * batch.advantages, batch, denominator), {"weight": weight}
