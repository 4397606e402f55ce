"""The studies of `claims.off_policy`: methods, conditions, what is tuned, and what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .arithmetic import SUMS
from .lagging import LAGGING, Actor, Method
from .tokens import Task

RATES = (3e-3, 1e-2, 3e-2)
Family = Mapping[str, Method]


@dataclass(frozen=True)
class Design:
    """`families`: what is compared → its variants, of which tuning picks one beside the rate. `reference`: the family
    that the others are held against. `pretrained`: the policy is that of `arithmetic`."""

    families: Mapping[str, Family]
    conditions: Mapping[str, Actor]
    reference: str
    finding: str
    rates: tuple[float, ...] = RATES
    tuning: tuple[int, ...] = (0, 1)
    fresh: tuple[int, ...] = tuple(range(100, 110))
    steps: int = 300
    every: int = 15
    note: str = ""
    task: Task = LAGGING
    pretrained: bool = False


def alone(losses: Mapping[str, Mapping[str, Any]]) -> dict[str, Family]:
    """Families of one variant each."""
    return {name: {name: Method(loss)} for name, loss in losses.items()}


MIS: dict[str, Any] = {"name": "ratio", "weight": "token", "reject": "ratio", "high": 2.0}
"""Token-level truncated weights that mask what is above the bound instead (verl's token_mis)."""
CORRECTIONS: dict[str, Any] = {
    "no correction": "none",
    "tis": "tis",
    "mis": MIS,
    "icepop": "icepop",
    "seq_tis": "seq_tis",
    "seq_mis": "seq_mis",
    "geo_mask": "geo_mask",
    "geo_mask, wide": {"name": "geo_mask", "low": 0.9, "high": 1.1},
}


def corrected(loss: str, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {f"{loss}, {name}": {"name": loss, "correction": CORRECTIONS[name]} for name in names}


MISMATCH = Design(
    alone({n: {"name": "decoupled_ppo", "correction": c} for n, c in CORRECTIONS.items()}),
    {
        "no mismatch": Actor(),
        "σ = .6": Actor(mismatch=0.6),
        "σ = .3": Actor(mismatch=0.3),
        "int4": Actor(mismatch="int4"),
        "int8": Actor(mismatch="int8"),
        "fp8": Actor(mismatch="fp8"),
        "σ = .6, stays": Actor(mismatch=0.6, stays=True),
        "σ = .3, stays": Actor(mismatch=0.3, stays=True),
    },
    reference="no correction",
    finding="Noise that stays asks for truncated weights, noise drawn anew does not; rejecting costs reward",
    note="Decoupled PPO, fresh batches, token reversal, 300 steps; each method at the best of three learning rates",
)
LOSSES = ("reinforce", "ppo", "decoupled_ppo", "tis", "cispo", "gspo", "sapo", "vespo", "topr", "m2po", "dg")
OFFPOLICY = Design(
    alone(
        {name: {"name": name} for name in LOSSES}
        | {"decoupled_ppo, seq_mis": {"name": "decoupled_ppo", "correction": "seq_mis"}}
    ),
    {f"η = {age}": Actor(staleness=age) for age in (0, 4, 16, 64)},
    reference="decoupled_ppo",
    rates=(*RATES, 1e-1),
    finding="With age truncated token weights hold; products of ratios and clips around the old policy fade",
    note="Token reversal, 300 steps; each loss at the best of four learning rates",
)
BASES = ("decoupled_ppo", "reinforce", "dg")
BOTH = Design(
    alone(
        {
            n: s
            for base in BASES
            for n, s in corrected(base, ("no correction", "tis", "icepop", "seq_tis", "seq_mis")).items()
        }
    ),
    {
        "η = 16": Actor(staleness=16),
        "int4": Actor(mismatch="int4"),
        "η = 16, int4": Actor(staleness=16, mismatch="int4"),
    },
    reference="decoupled_ppo, no correction",
    finding="Age decides, int4 adds nothing to it; truncated weights and bands of tokens hold",
    note="Token reversal, 300 steps, entropy bonus .02; each method at the best of three learning rates",
)


def variants(loss: Mapping[str, Any], path: str, values: Sequence[float], bonuses: Sequence[float]) -> Family:
    """A loss with each value of one knob and each bonus."""
    return {
        f"{loss['name']} {_marked(loss)}{path.rpartition('.')[2]} {value:g} β {bonus:g}": Method(
            _with(loss, path, value), bonus
        )
        for value in values
        for bonus in bonuses
    }


def _marked(loss: Mapping[str, Any]) -> str:
    return f"{loss['correction']['name']} " if "correction" in loss else ""


def _with(loss: Mapping[str, Any], path: str, value: float) -> dict[str, Any]:
    knob, _, inner = path.partition(".")
    return {**loss, knob: {**loss.get(knob, {}), inner: value} if inner else value}


BONUSES = (0.0, 0.005, 0.02)
DG_FAIR = Design(
    {
        "dg": variants({"name": "dg"}, "gate_temperature", (0.1, 0.3, 1.0), BONUSES),
        "dg, tis": variants(
            {"name": "dg", "correction": {"name": "tis"}}, "gate_temperature", (0.1, 0.3, 1.0), BONUSES
        ),
        "ppo": variants({"name": "ppo"}, "clip", (0.1, 0.2, 0.4), BONUSES),
        "decoupled_ppo": variants({"name": "decoupled_ppo"}, "clip", (0.1, 0.2, 0.4), BONUSES),
        "tis": variants(
            {"name": "tis", "correction": {"name": "tis"}}, "correction.weight_high", (1.28, 2.0, 5.0), BONUSES
        ),
    },
    {
        "η = 0": Actor(),
        "η = 16": Actor(staleness=16),
        "bug .2": Actor(bug=0.2),
        "silent bug .2": Actor(bug=0.2, silent=True),
    },
    reference="dg",
    finding="Tuned alike, all losses learn; behind silently broken actors DG does, PPO, decoupled PPO and TIS do not",
    note="Token reversal, 300 steps; each loss at the best of 27 candidates (rate, entropy bonus, own knob)",
)


def bonuses(losses: Mapping[str, Mapping[str, Any]], values: Sequence[float]) -> dict[str, Family]:
    """A family for each loss, with each of these bonuses."""
    return {name: {f"{name} β {value:g}": Method(loss, value) for value in values} for name, loss in losses.items()}


NINE = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1)
"""Bonuses of losses without a knob of their own: as many candidates as three knobs × `BONUSES`."""
SUCCESSES = Design(
    {
        "dg": DG_FAIR.families["dg"],
        "successes": bonuses({"successes": {"name": "dg", "gate_temperature": 0.0}}, NINE)["successes"],
        "pmpo, α = 1": variants({"name": "pmpo", "alpha": 1.0}, "beta", (0.0, 0.1, 0.3), BONUSES),
        "pmpo": variants({"name": "pmpo"}, "alpha", (0.5, 0.75, 0.9), BONUSES),
        "topr": bonuses({"topr": {"name": "topr"}}, NINE)["topr"],
        "reinforce": bonuses({"reinforce": {"name": "reinforce"}}, NINE)["reinforce"],
    },
    {**DG_FAIR.conditions, "silent bug .5": Actor(bug=0.5, silent=True)},
    reference="dg",
    finding="Behind silently broken actors training successes only learns more than DG; weights do not help",
    note="Token reversal, 300 steps; each loss at the best of 27 candidates (rate, entropy bonus, own knob if any)",
)
"""The controls of `DG_FAIR` behind silent bugs. `successes`: DG's gate at its limit 0, which is REINFORCE on positive
advantages alone; PMPO at α = 1 raises the likelihood of all successes alike (what a filter leaves, imitated)."""


GRID_LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {"name": "ppo"},
    "decoupled_ppo": {"name": "decoupled_ppo"},
    "tis": {"name": "tis"},
    "seq_tis": {"name": "decoupled_ppo", "correction": "seq_tis"},
    "seq_mis": {"name": "decoupled_ppo", "correction": "seq_mis"},
    "m2po": {"name": "m2po"},
    "dg": {"name": "dg"},
    "dg, tis": {"name": "dg", "correction": "tis"},
    "dg, seq_mis": {"name": "dg", "correction": "seq_mis"},
}
AGES, MISMATCHES = (0, 1, 4, 16, 32), {"exact": None, "int8": "int8", "σ = .6": 0.6}
GRID = Design(
    bonuses(GRID_LOSSES, (0.0, 0.02)),
    {f"{name}, η = {age}": Actor(staleness=age, mismatch=how) for name, how in MISMATCHES.items() for age in AGES},
    reference="decoupled_ppo",
    finding="DG with truncated behaviour weights holds at every age and mismatch; products of ratios do not",
    fresh=tuple(range(100, 112)),
    note="Token reversal, 300 steps; each loss at its best rate of three and bonus of two under each condition",
)
PRETRAINED = Design(
    bonuses({name: loss for name, loss in GRID_LOSSES.items() if name != "dg, seq_mis"}, (0.0,)),
    {
        f"{name}, η = {age}": Actor(staleness=age, mismatch=how)
        for name, how in {"exact": None, "int8": "int8", "int4": "int4"}.items()
        for age in AGES
    },
    reference="tis",
    finding="Behind int4 actors a pretrained model learns nothing by PPO, at any age; by truncated weights it does",
    rates=(5e-5, 2e-4),
    tuning=(0,),
    fresh=(100, 101),
    steps=24,
    every=8,
    note="SmolLM2-135M-Instruct, its two upper layers trained on sums of reasoning_gym, 24 steps of 96 answers; each "
    "loss at the better of two rates",
    task=SUMS,
    pretrained=True,
)
DESIGNS = {
    "mismatch": MISMATCH,
    "offpolicy": OFFPOLICY,
    "corrections": BOTH,
    "dg_fair": DG_FAIR,
    "successes": SUCCESSES,
    "grid": GRID,
    "pretrained": PRETRAINED,
}
