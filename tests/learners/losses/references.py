"""Every loss and every correction as plain loops over NumPy arrays, written from the papers' formulas. A reference
returns the loss's value and its gradient by the logprob of each token [N]; a correction is a factor of the share, 0
where it rejects."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from learners.losses.contract import LossBatch

Result = tuple[float, np.ndarray]


@dataclass
class Tokens:
    """Arrays [N] of a batch. `planned`: the tokens that a plan sees; `base`: the shares that it sees."""

    current: np.ndarray
    behaviour: np.ndarray
    proximal: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray
    sequence: np.ndarray
    group: np.ndarray
    staleness: np.ndarray
    share: np.ndarray
    planned: np.ndarray
    base: np.ndarray

    @classmethod
    def of(cls, batch: LossBatch) -> "Tokens":
        names = ("current", "behaviour", "proximal", "advantages", "mask", "sequence", "group", "staleness")
        arrays = {name: getattr(batch, name).detach().numpy() for name in names}
        share = np.ones(len(batch.mask)) if batch.share is None else batch.share.numpy()
        return cls(**arrays, share=share, planned=arrays["mask"], base=share)

    def members(self, mask: np.ndarray) -> dict[int, np.ndarray]:
        """Each token of the mask → the places of its sequence's tokens in the mask."""
        return {t: np.flatnonzero(mask & (self.sequence == self.sequence[t])) for t in np.flatnonzero(mask)}


def per_token(t: Tokens, objective: np.ndarray, slope: np.ndarray) -> Result:
    """`slope`: of the objective by the token's own logprob."""
    weight = np.where(t.mask, t.share, 0.0)
    return -float((weight * np.where(t.mask, objective, 0.0)).sum()), -weight * np.where(t.mask, slope, 0.0)


def score(t: Tokens, weight: np.ndarray) -> Result:
    return per_token(t, weight * t.current, weight)


def surrogate(
    ratio: float, advantage: float, low: float, high: float | None, dual: float | None
) -> tuple[float, float]:
    """PPO's objective of one token and its derivative by the ratio, case by case."""
    high = low if high is None else high
    if advantage >= 0:
        return (ratio * advantage, advantage) if ratio < 1 + high else ((1 + high) * advantage, 0.0)
    if ratio < 1 - low:
        return (1 - low) * advantage, 0.0
    if dual is not None and ratio > dual:
        return dual * advantage, 0.0
    return ratio * advantage, advantage


def clip(t: Tokens, centre: np.ndarray, k: dict[str, Any]) -> Result:
    ratio = np.exp(t.current - centre)
    knobs = k.get("clip", 0.2), k.get("clip_high"), k.get("dual_clip")
    value, slope = np.array([surrogate(r, a, *knobs) for r, a in zip(ratio, t.advantages, strict=True)]).T
    return per_token(t, value, slope * ratio)


def centre(t: Tokens, proximal: str | None) -> np.ndarray:
    if proximal == "interpolate":
        return t.behaviour + t.staleness / (t.staleness + 1) * (t.current - t.behaviour)
    return t.proximal if proximal == "recompute" else t.behaviour


def gspo(t: Tokens, k: dict[str, Any]) -> Result:
    around, value, gradient = centre(t, k.get("proximal")), 0.0, np.zeros(len(t.mask))
    for at, own in t.members(t.mask).items():
        ratio = math.exp(np.mean(t.current[own] - around[own]))
        advantage = t.advantages[at]
        objective, slope = surrogate(ratio, advantage, k["clip"], k.get("clip_high", 4e-4), k.get("dual_clip"))
        value -= t.share[at] * objective
        reached = ([at], 1) if k.get("per_token") else (own, len(own))
        gradient[reached[0]] -= t.share[at] * slope * ratio / reached[1]
    return value, gradient


def sapo(t: Tokens, k: dict[str, Any]) -> Result:
    tau = np.where(t.advantages > 0, k.get("temperature", 1.0), k.get("temperature_negative", 1.05))
    ratio = np.exp(t.current - t.behaviour)
    gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
    return per_token(t, 4 / tau * gate * t.advantages, 4 * gate * (1 - gate) * ratio * t.advantages)


def m2po(t: Tokens, k: dict[str, Any]) -> Result:
    squared, left = (t.current - t.behaviour) ** 2, list(np.flatnonzero(t.planned))
    while left and np.mean(squared[left]) > k.get("threshold", 0.04):
        left.remove(max(left, key=lambda i: squared[i]))
    gain = np.isin(np.arange(len(squared)), left) * np.exp(t.current - t.behaviour) * t.advantages
    return per_token(t, gain, gain)


def dppo(t: Tokens, k: dict[str, Any]) -> Result:
    moved, low, high = np.exp(t.current) - np.exp(t.behaviour), k["tv"], k.get("tv_high", k["tv"])
    far = np.where(t.advantages > 0, moved > high, moved < -low)
    gain = np.where(far, 0.0, np.exp(t.current - t.behaviour) * t.advantages)
    return per_token(t, gain, gain)


def dg(t: Tokens, k: dict[str, Any]) -> Result:
    surplus, heat = -t.current * t.advantages - k.get("gate_threshold", 0.0), k.get("gate_temperature", 1.0)
    gate = 1 / (1 + np.exp(-surplus / heat)) if heat else (surplus > 0).astype(float)
    return score(t, gate * t.advantages)


def dg_kondo(t: Tokens, k: dict[str, Any]) -> Result:
    places = sorted(np.flatnonzero(t.planned), key=lambda i: t.current[i] * t.advantages[i])
    kept = places[: math.ceil(k["keep"] * len(places))]
    return score(t, np.isin(np.arange(len(t.mask)), kept) * t.advantages)


def pmpo(t: Tokens, k: dict[str, Any]) -> Result:
    alpha, beta = k.get("alpha", 0.5), k.get("beta", 0.1)
    good, bad = t.planned & (t.advantages > 0), t.planned & (t.advantages < 0)
    everything = t.base[t.planned].sum()
    weight = np.where(good, alpha * everything / t.base[good].sum(), 0.0)
    weight -= np.where(bad, (1 - alpha) * everything / t.base[bad].sum(), 0.0)
    return per_token(t, weight * t.current + beta * (t.current - t.behaviour), weight + beta)


def tpo(t: Tokens, k: dict[str, Any]) -> Result:
    """(q − p) on each sequence's logprob, as a mean over groups of the cross-entropy's gradient."""
    weight = np.zeros(len(t.mask))
    groups = [np.flatnonzero(t.planned & (t.group == g)) for g in np.unique(t.group[t.planned])]
    for places in groups:
        owners = np.unique(t.sequence[places])
        parts = [places[t.sequence[places] == s] for s in owners]
        now, old = (np.array([of[p].sum() for p in parts]) for of in (t.current, t.behaviour))
        scores = np.array([t.advantages[p[0]] for p in parts])
        z = (scores - scores.mean()) / scores.std() if scores.std() > 1e-6 else 0 * scores
        for part, pull in zip(parts, softmax(old + z / k["temperature"]) - softmax(now), strict=True):
            weight[part] = pull * t.base[t.planned].sum() / len(groups)
    return score(t, weight)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


REFERENCES: dict[str, Callable[[Tokens, dict[str, Any]], Result]] = {
    "ppo": lambda t, k: clip(t, t.behaviour, k),
    "decoupled_ppo": lambda t, k: clip(t, centre(t, k.get("proximal", "recompute")), k),
    "gspo": gspo,
    "sapo": sapo,
    "reinforce": lambda t, k: score(t, t.advantages),
    "m2po": m2po,
    "dppo": dppo,
    "dg": dg,
    "dg_kondo": dg_kondo,
    "pmpo": pmpo,
    "tpo": tpo,
    "sft": lambda t, k: score(t, np.ones(len(t.mask))),
}

# Corrections

MEASURES: dict[str, Callable[..., float]] = {
    "ratio": lambda d: d,
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - 1 - d,
    "k3_reverse": lambda d: math.exp(-d) - 1 + d,
}
AGGREGATES: dict[str, Callable[..., float]] = {"sum": sum, "mean": np.mean, "max": max, "min": min}


def factors(t: Tokens, link: dict[str, Any], pair: str, proximal: str | None = None) -> np.ndarray:
    """The factor of each token [N] by one link of a correction; masked tokens have 1."""
    known = {"behaviour": t.behaviour, "current": t.current, "proximal": t.proximal}
    if proximal == "interpolate":
        known["proximal"] = centre(t, proximal)
    earlier, later = (known[name] for name in (link.get("pair") or pair).split("_"))
    found = np.ones(len(t.mask))
    for at, own in t.members(t.mask).items():
        if link.get("where") == "negative" and t.advantages[at] >= 0:
            continue
        moved = later[own] - earlier[own]
        here = later[at] - earlier[at]
        log_weight = {"none": 0.0, "token": here, "sequence": moved.sum(), "geometric": moved.mean()}
        weight = math.exp(log_weight[link.get("weight", "token")])
        found[at] = min(max(weight, link.get("weight_low", 0.0)), link.get("weight_high", math.inf))
        if "reject" in link:
            measure = MEASURES[link["reject"]]
            values = {i: measure(later[i] - earlier[i]) for i in own}
            over = link.get("over", "token")
            value = values[at] if over == "token" else AGGREGATES[over](list(values.values()))
            value = math.exp(value) if link["reject"] == "ratio" else value
            if not link.get("low", -math.inf) <= value <= link.get("high", math.inf):
                found[at] = 0.0
    return found


def corrected(name: str, knobs: dict[str, Any], links: list[dict[str, Any]], pair: str, batch: LossBatch) -> Result:
    """A loss with the links of a correction. A rejected token has no part in its sequence's ratio; a plan of the loss
    still sees it."""
    t = Tokens.of(batch)
    product = np.ones(len(t.mask))
    for link in links:
        product = product * factors(t, link, pair, knobs.get("proximal"))
    stays = t.mask & (product > 0)
    narrowed = replace(t, mask=stays, share=t.share * product)
    return REFERENCES[name](narrowed, knobs)
