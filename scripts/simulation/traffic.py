"""Bytes of weights that a plan sends: of the config's model, whole or as deltas.

A delta names the elements that changed since the version before, and by how much. It is compressed to about the entropy
of the places and `STEP_BITS` per change: on random changes of .3 to 90 % of the elements the codec takes as much,
within a fifth (`tests/scripts/test_plan_command.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from areal_like.config.run_config import Config

STEP_BITS = 2.0
"""How far an element went, mostly to a neighbour: what the codec takes beside the places."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of a version's weights for one actor, and in words what they are."""

    sent: float
    note: str

    def figures(self, actors: int, interval: int) -> dict[str, float]:
        """To all actors, per version and per train step."""
        every = self.sent * actors
        return {
            "weight_bytes_per_actor": self.sent,
            "weight_bytes_per_version": every,
            "weight_bytes_per_step": every / interval,
        }


UNKNOWN = dict.fromkeys(Traffic(0.0, "").figures(1, 1))
"""The figures where the model is not known."""


def traffic(config: Config, density: float | None) -> Traffic | None:
    """`density`: the share of elements that a version changes. None where no part of the config computes a model."""
    if config.engine.name == config.learner.name == "timed":
        return None  # without torch, which takes seconds to import
    from ..starting.estimate import model_of, plain_of, update_bytes

    plain = plain_of(config)
    model = model_of(plain)
    if model is None:
        return None
    count = sum(each.numel() for each in model.parameters())
    whole = update_bytes(plain, count)
    if config.weights.coding == "full":
        return Traffic(whole, "whole (weights.coding=full)")
    if density is None:
        return Traffic(whole, "at most: as whole weights. Deltas are smaller, by the share that changes (--density)")
    sent = count * delta_bytes(density, whole // count)
    return Traffic(sent, f"of deltas that change {density:.2%} of the weights")


def delta_bytes(density: float, width: int) -> float:
    """Per element, of `width` bytes."""
    kept = 1.0 - density
    places = -density * math.log2(density) - (kept * math.log2(kept) if kept > 0 else 0.0)
    return min(float(width), (places + STEP_BITS * density) / 8)


def amount_of(count: float) -> str:
    """Bytes for people."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} B"
