"""Corrections beside the loss: importance weight × rejection × the pair of policies, for any loss.

A correction multiplies the objective of each token by a *factor* without gradient: its importance weight, or 0 where it
rejects the token. The factor enters through `LossBatch.share`, rejection through `LossBatch.mask`. Several corrections
multiply (`correction` within a correction). The functions here take a loss and return the corrected one; `ratio` has
all knobs, the others are names for some of their values. A weight over its bound is *cut*; a token out of bounds is
*rejected*.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from areal_like.config.conflicts import problems_of_correction
from areal_like.config.registry import as_spec, build
from learners.losses.clipped import interpolated
from learners.losses.contract import (
    LOG_RATIO_LIMIT,
    LossBatch,
    LossFunction,
    Observed,
    log_ratio,
    marks_of,
    merged,
    proximal_of,
    required,
    sequence_means,
    sequence_sums,
)


@dataclass(frozen=True)
class ChainLink:
    """One weight and one rejection. The knobs are those of `ratio`."""

    pair: str
    weight: str
    weight_low: float
    weight_high: float
    reject: str
    over: str
    low: float | None
    high: float | None
    where: str

    def of(self, batch: LossBatch) -> tuple[Tensor, Tensor, Observed]:
        """Each token's weight within its bounds [N], which tokens stay (bool [N]), and the observations."""
        moved = self._log_ratio(batch)
        seen: Observed = {}
        raw = cut = torch.ones_like(moved)
        if self.weight != "none":
            over = {"token": "token", "sequence": "sum", "geometric": "mean"}[self.weight]
            raw = _over(moved, over, batch).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            cut = raw.clamp(self.weight_low, self.weight_high)
            if self.where == "negative":
                raw, cut = (torch.where(batch.advantages < 0, each, 1.0) for each in (raw, cut))
            seen = {"behaviour_weight": raw}
            if self.weight_low > 0 or self.weight_high < math.inf:
                seen["capped_share"] = batch.mask & (raw != cut)
        stays = batch.mask
        if self.reject != "none":
            outside = self._outside(moved, batch) & batch.mask
            if self.where == "negative":
                outside &= batch.advantages < 0
            stays = batch.mask & ~outside
            seen["masked_share"] = outside
        return cut, stays, seen

    def _log_ratio(self, batch: LossBatch) -> Tensor:
        """log later/earlier of the tokens [N], 0 where they are masked."""
        known = {"behaviour": batch.behaviour, "current": batch.current.detach()}
        if "proximal" in self.pair:
            known["proximal"] = required(batch.proximal, "proximal logprobs", f"a correction of {self.pair}").detach()
        earlier, later = self.pair.split("_")
        return log_ratio(known[later], known[earlier], batch.mask)

    def _outside(self, moved: Tensor, batch: LossBatch) -> Tensor:
        """The tokens that are out of bounds, or all tokens of such sequences: bool [N]."""
        found = _over(self._measured(moved), self.over, batch)
        if self.reject == "ratio":
            found = found.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        low, high = -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high
        return (found < low) | (found > high)

    def _measured(self, moved: Tensor) -> Tensor:
        """The value compared with the bounds, per token [N]; for a ratio its logarithm."""
        if self.reject == "k1":
            return -moved
        if self.reject == "k2":
            return 0.5 * moved**2
        if self.reject == "k3":
            return torch.expm1(moved) - moved
        if self.reject == "k3_reverse":
            return torch.expm1(-moved) + moved
        return moved


def _over(values: Tensor, over: str, batch: LossBatch) -> Tensor:
    """Numbers of tokens [N], or for each token that of its sequence [N]."""
    if over == "sum":
        return sequence_sums(values, batch)
    if over == "mean":
        return sequence_means(values, batch)
    if over == "token":
        return values
    sign = 1.0 if over == "max" else -1.0
    most = values.new_full((batch.most_sequences,), -math.inf)
    there = torch.where(batch.mask, sign * values, -math.inf)
    return sign * most.scatter_reduce(0, batch.sequence, there, "amax")[batch.sequence]


class Corrected:
    """A loss, each token's objective times the factors of its links. A plan of the loss sees rejected tokens, too."""

    def __init__(self, loss: LossFunction, links: list[ChainLink]):
        self.loss, self.links, own = loss, links, marks_of(loss)
        around = any("proximal" in link.pair for link in links)
        self._interpolates = around and proximal_of(loss) == "interpolate"
        self.marks = replace(own, wants_proximal=own.wants_proximal or (around and not self._interpolates))

    def __call__(self, batch: LossBatch, denominator: float) -> tuple[Tensor, Observed]:
        factors, seen = self.factors(batch)
        share = factors if batch.share is None else batch.share * factors
        corrected = replace(batch, mask=batch.mask & (factors > 0), share=share)
        value, observed = self.loss(corrected, denominator)
        return value, merged(seen, observed)

    @torch.no_grad()
    def factors(self, batch: LossBatch) -> tuple[Tensor, Observed]:
        """Each token's factor [N], 0 where it is rejected and 1 where it is masked, and the observations."""
        if self._interpolates:
            batch = replace(batch, proximal=interpolated(batch))
        factors, stays, observed = torch.ones_like(batch.behaviour), batch.mask, dict[str, Tensor]()
        for link in self.links:
            weight, kept, seen = link.of(batch)
            factors, stays, observed = factors * weight, stays & kept, merged(observed, seen)
        factors = torch.where(stays, factors, (~batch.mask).to(factors.dtype))
        return factors, observed | {"factor": factors}


# The corrections that a config can name


def none(loss: LossFunction) -> LossFunction:
    """The loss as it is."""
    return loss


def ratio(  # noqa: PLR0913 - a component's knobs are its keyword-only parameters
    loss: LossFunction,
    *,
    pair: Literal["behaviour_proximal", "proximal_current", "behaviour_current"] | None = None,
    weight: Literal["none", "token", "sequence", "geometric"] = "token",
    weight_low: Annotated[float, "[0, 1]"] = 0.0,
    weight_high: Annotated[float, "[1, inf]"] = math.inf,
    reject: Literal["none", "ratio", "k1", "k2", "k3", "k3_reverse"] = "none",
    over: Literal["token", "sum", "mean", "max", "min"] = "token",
    low: Annotated[float, "[-inf, inf]"] | None = None,
    high: Annotated[float, "[-inf, inf]"] | None = None,
    where: Literal["all", "negative"] = "all",
    correction: str | Mapping[str, Any] = "none",
) -> Corrected:
    """Weighs each token by a ratio of probabilities, and rejects tokens or sequences that are out of bounds.

    `pair`: which two policies, the earlier before the later. None: the pair that the loss's own ratio does not cover.
    `weight`: the token's own ratio, the product over its "sequence", its "geometric" mean over the sequence, or "none".
    It is cut to [`weight_low`, `weight_high`] (infinite: exact, Precup et al. 2000; from above: truncated, Ionides
    2008).

    `reject`: what must lie within [`low`, `high`] (None: no bound). With d = log later/earlier: the ratio e^d; the
    estimates of KL(earlier ‖ later) k1 = −d, k2 = d²/2 and k3 = e^d − 1 − d; or k3_reverse = e^−d − 1 + d. `over`: for
    each "token" alone, or for all tokens of a sequence by the sum, the mean, the largest ("max") or the smallest
    ("min") of its tokens. `where` "negative": only tokens with an advantage below 0 are weighed or rejected.

    Rejected tokens have no objective and do not count in their sequence's ratio, but stay in the denominator. A further
    `correction` applies as well.
    """
    knobs = dict(locals())
    corrected = build("correction", as_spec(correction), knobs.pop("loss"))
    plain, links = (corrected.loss, corrected.links) if isinstance(corrected, Corrected) else (corrected, [])
    own = marks_of(plain).own_ratio
    for knob, problem in problems_of_correction(knobs, own):
        raise ValueError(f"{knob}: {problem}")
    known = pair or ("behaviour_proximal" if own == "proximal_current" else "behaviour_current")
    link = ChainLink(known, weight, weight_low, weight_high, reject, over, low, high, where)
    return Corrected(plain, [link, *links])


exact = partial(ratio, weight="sequence")
tis = partial(ratio, weight="token", weight_high=2.0)
cispo = partial(ratio, weight="token", weight_high=1.28)
capped = partial(ratio, weight="token", reject="ratio", high=5.0)
icepop = partial(ratio, weight="token", reject="ratio", low=0.5, high=5.0)
topr = partial(ratio, weight="sequence", weight_high=1.0, where="negative")
seq_tis = partial(ratio, weight="sequence", weight_high=2.0)
seq_mis = partial(ratio, weight="sequence", reject="ratio", over="sum", high=2.0)
geo_mask = partial(ratio, weight="none", reject="ratio", over="mean", low=0.999, high=1.001)
sequence_mask = partial(
    ratio, pair="behaviour_current", weight="none", reject="k1", over="mean", high=0.5, where="negative"
)
