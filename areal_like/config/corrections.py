"""Corrections of a loss as a config says them: `loss.correction`.

    loss: {name: dg, correction: tis}
    loss: {name: decoupled_ppo, correction: {high: 2}}

A loss that is usually corrected has its usual correction unless the config says another (`USUAL`). Knobs without a name
are the usual one's. `learners.losses.corrections` computes them. This module checks what is known before anything is
built: which correction is meant, and whether its knobs make sense, alone and with the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

NONE = "none"
GENERAL = "ratio"
"""The correction that has all knobs; others are names for some of their values."""
USUAL = {
    "decoupled_ppo": "capped",
    "icepop": "icepop",
    "tis": "tis",
    "cispo": "cispo",
    "is_pg": "exact",
    "mis_po": "mis_po",
    "topr": "topr",
}
"""A loss's name → its correction where the config says none."""
NEVER_NEGATIVE = ("k2", "k3", "k3_reverse", "binary_kl")

Problem = tuple[str, str]
"""A knob and what is wrong with it."""


def resolve_correction(loss: str, given: object) -> dict[str, object]:
    """The correction of a loss of this name, as a spec; `given` is what the config says: a name, knobs, both, or None.
    Raises TypeError for another kind of thing."""
    if given is None:
        given = {}
    if not isinstance(given, str | Mapping):
        raise TypeError(f"expected a name or {{name: ..., knobs}}, got {given!r}")
    spec = {"name": given} if isinstance(given, str) else dict(given)
    usual = USUAL.get(loss, NONE)
    return {"name": GENERAL if spec and usual == NONE else usual} | spec


def problem_of(knobs: Mapping[str, object]) -> Problem | None:
    """What makes no sense in the knobs of a correction, all of them given."""
    for found in (_problem_of_weight(knobs), _problem_of_rejection(knobs)):
        if found:
            return found
    if knobs["weight"] == NONE == knobs["reject"] == NONE:
        return "weight", "it neither weighs nor rejects: set weight or reject, or leave the correction out"
    return None


def _problem_of_weight(knobs: Mapping[str, object]) -> Problem | None:
    if knobs["weight"] != NONE:
        return None
    for knob, off in (("weight_low", 0.0), ("weight_high", math.inf), ("self_normalise", False)):
        if knobs[knob] != off:
            return knob, "there is no weight that it could bound: set weight to token, sequence or geometric"
    return None


def _problem_of_rejection(knobs: Mapping[str, object]) -> Problem | None:
    low, high, what = knobs["low"], knobs["high"], knobs["reject"]
    if what == NONE:
        for knob, off in (("low", None), ("high", None), ("over", "token"), ("rejected", "mask")):
            if knobs[knob] != off:
                return knob, "nothing is rejected: set reject to ratio, k1, k2, k3, k3_reverse or binary_kl"
        return None
    if low is None and high is None:
        return "high", f"reject={what} needs a bound: set high, low, or both"
    if what in NEVER_NEGATIVE and low is not None:
        return "low", f"{what} is never negative, and small where the policies agree: it has no lower bound"
    on_policy = 1.0 if what == "ratio" else 0.0
    if not _number(low, -math.inf) <= on_policy <= _number(high, math.inf):
        return (
            "low" if _number(low, -math.inf) > on_policy else "high",
            f"the bounds must enclose {on_policy:g}, which is {what} where the policies agree, got {low} and {high}",
        )
    return None


def _number(bound: object, otherwise: float) -> float:
    return float(bound) if isinstance(bound, int | float) else otherwise


def problem_with_loss(knobs: Mapping[str, object], own_ratio: str | None) -> Problem | None:
    """A weight that a loss has in its own ratio already (`own_ratio`: behaviour_current, proximal_current, None)."""
    if knobs["weight"] == NONE or own_ratio is None:
        return None
    left = "behaviour_proximal"
    if own_ratio == "behaviour_current":
        return "weight", "the loss has the whole ratio to the behaviour policy itself: only reject, with weight=none"
    if (knobs["pair"] or left) != left:
        return "pair", f"the loss has current/proximal itself, which would count twice: weigh by {left}"
    return None
