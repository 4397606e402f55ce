"""Synthetic batches of tokens, and every loss and correction with knobs that make all of its cases occur."""

from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch

from areal_like.config.registry import COMPONENTS, bind, resolve
from learners.losses.contract import LossBatch, marks_of, planned_for
from tests.seeds import seeded

KNOBS: dict[str, list[dict[str, Any]]] = {
    "ppo": [{}, {"clip": 0.1, "clip_high": 0.3, "dual_clip": 1.2}],
    "decoupled_ppo": [{}, {"clip_high": 0.28, "dual_clip": 1.5}, {"proximal": "interpolate"}],
    "gspo": [{"clip": 0.1, "clip_high": 0.2}, {"clip": 0.1, "proximal": "recompute"}, {"clip": 0.1, "per_token": True}],
    "sapo": [{}, {"temperature": 2.0, "temperature_negative": 3.0}],
    "reinforce": [{}],
    "m2po": [{}, {"threshold": 0.2}],
    "dppo": [{"tv": 0.05, "tv_high": 0.03}, {"tv": 0.1}],
    "dg": [{"gate_temperature": 0.5, "gate_threshold": 0.1}, {"gate_temperature": 0.0}],
    "dg_kondo": [{"keep": 0.3}, {"keep": 0.03}],
    "pmpo": [{}, {"alpha": 0.9, "beta": 0.0}],
    "tpo": [{"temperature": 0.7}],
    "sft": [{}],
}
"""Name of a loss function → some sets of its knobs."""
BELOW_ZERO = dict(pair="behaviour_current", weight="none", reject="k1", over="mean", high=0.1, where="negative")
LINKS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "exact": [{"weight": "sequence"}],
    "tis": [{"weight_high": 1.2}],
    "cispo": [{"weight_low": 0.7, "weight_high": 1.2}],
    "capped": [{"reject": "ratio", "high": 1.4}],
    "icepop": [{"reject": "ratio", "low": 0.8, "high": 1.3}],
    "topr": [{"weight": "sequence", "weight_high": 1.0, "where": "negative"}],
    "seq_tis": [{"weight": "sequence", "weight_high": 2.0}],
    "seq_mis": [{"weight": "sequence", "reject": "ratio", "over": "sum", "high": 2.0}],
    "geo_mask": [{"weight": "none", "reject": "ratio", "over": "mean", "low": 0.8, "high": 1.2}],
    "sequence_mask": [BELOW_ZERO],
    "ratio twice": [
        {"pair": "behaviour_proximal", "weight": "none", "reject": "ratio", "low": 0.5, "high": 2.0},
        {"pair": "behaviour_proximal", "weight": "none", "reject": "ratio", "over": "mean", "low": 0.8, "high": 1.2},
    ],
    "ratio k2": [{"weight": "geometric", "reject": "k2", "high": 0.3}],
    "ratio max": [{"weight": "none", "reject": "ratio", "over": "max", "high": 1.6}],
    "ratio k3": [{"weight": "none", "reject": "k3", "over": "sum", "high": 0.5}],
    "ratio k3_reverse": [{"pair": "proximal_current", "weight": "none", "reject": "k3_reverse", "high": 0.07}],
    "ratio min": [{"weight": "geometric", "reject": "ratio", "over": "min", "low": 0.6}],
}
"""Name of a correction → the knobs of its links, as the references read them."""
LENGTH = 6
"""Tokens per sequence; two sequences are a group."""


def own_ratio(name: str, knobs: dict[str, Any]) -> str | None:
    """The policies whose ratio a loss contains: no weight may repeat it."""
    return marks_of(partial(resolve("loss", name), **knobs)).own_ratio


def is_refused(name: str, knobs: dict[str, Any], links: list[dict[str, Any]]) -> bool:
    own, weighs = own_ratio(name, knobs), [link for link in links if link.get("weight") != "none"]
    if own == "proximal_current":
        return any(link.get("pair", "behaviour_proximal") != "behaviour_proximal" for link in weighs)
    return own is not None and bool(weighs)


def spec(links: list[dict[str, Any]]) -> dict[str, Any] | str:
    """A correction of these links."""
    found: dict[str, Any] | str = "none"
    for link in reversed(links):
        found = {"name": "ratio", **link, "correction": found}
    return found


def loss_of(name: str, knobs: dict[str, Any], correction: str = "none") -> Any:
    return bind("loss", {"name": name, **knobs, "correction": spec(LINKS[correction])})


LOSSES = {f"{name} {knobs or ''}".strip(): loss_of(name, knobs) for name, sets in KNOBS.items() for knobs in sets}
for name, correction in (
    ("decoupled_ppo", "capped"), ("decoupled_ppo", "ratio k2"), ("reinforce", "tis"), ("ppo", "ratio max"),
    ("tpo", "ratio k3"), ("dg", "tis"), ("dg_kondo", "cispo"), ("m2po", "geo_mask"), ("sapo", "sequence_mask"),
):  # fmt: skip
    LOSSES[f"{name}, {correction}"] = loss_of(name, KNOBS[name][0], correction)
LOSSES |= {name: bind("loss", {"name": name}) for name in COMPONENTS["loss"] if name not in KNOBS}
"""Losses for tests that need no reference."""
FIRST = {f"{name} {sets[0] or ''}".strip() for name, sets in KNOBS.items()}
THROUGH_A_LEARNER = {name: loss for name, loss in LOSSES.items() if name in FIRST or marks_of(loss).plan}
"""One set of knobs per function, and all that plan: a learner treats the others alike."""
OTHERS = ("dg", "pmpo", "tpo", "sft")
POLICY_GRADIENT = [name for name in LOSSES if not name.startswith(OTHERS)]
"""Losses whose gradient on-policy is − Σ A ∇log π ÷ denominator."""


def batch_of(tokens: int = 60, seed: int = 0, spread: float = 0.4, masked: float = 0.2) -> LossBatch:
    """Random float64 logprobs whose ratios lie on both sides of every clip and cap; one advantage per sequence."""
    rng = seeded(seed)
    behaviour = -rng.exponential(1.5, tokens)
    proximal = behaviour + rng.normal(0, spread, tokens)
    current = proximal + rng.normal(0, spread, tokens)
    sequence = torch.arange(tokens) // LENGTH
    return LossBatch(
        current=torch.tensor(current, requires_grad=True),
        behaviour=torch.tensor(behaviour),
        proximal=torch.tensor(proximal),
        advantages=torch.tensor(rng.normal(0, 1, tokens))[sequence],
        mask=torch.tensor(rng.random(tokens) >= masked),
        sequence=sequence,
        staleness=torch.tensor(rng.integers(0, 4, tokens)),
        group=sequence // 2,
    )


def rows(batch: LossBatch, index: torch.Tensor) -> LossBatch:
    """Some of the tokens."""
    values = {field.name: getattr(batch, field.name) for field in fields(LossBatch)}
    return LossBatch(**{name: None if value is None else value[index] for name, value in values.items()})


def value_and_gradient(loss: Any, batch: LossBatch, denominator: float) -> tuple[float, np.ndarray, dict[str, Any]]:
    """A loss after its plan: its value, its gradient by the trained tokens' logprobs, and its observations."""
    value, observed = loss(planned_for(loss, batch)[0], denominator)
    (gradient,) = torch.autograd.grad(value, batch.current)
    mask = batch.mask
    assert not gradient[~mask].any()
    return value.item(), gradient[mask].numpy(), {name: v[mask].double().numpy() for name, v in observed.items()}
