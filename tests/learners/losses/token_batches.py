"""Synthetic batches of tokens for the losses' tests, and every loss with knobs that make its cases occur."""

from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from areal_like.config.registry import COMPONENTS, bind, resolve
from learners.losses.clipped import decoupled_ppo, gspo, ppo, sapo
from learners.losses.contract import LossBatch, with_plan
from learners.losses.corrections import (
    capped,
    cispo,
    exact,
    geo_mask,
    icepop,
    kpop,
    mis_po,
    ratio,
    seq_mis,
    seq_tis,
    sequence_mask,
    tis,
    topr,
)
from learners.losses.delightful import dg, dg_kondo
from learners.losses.supervised import sft
from learners.losses.targets import pmpo, tpo
from learners.losses.trusted import dppo, m2po
from learners.losses.weighted import reinforce, vespo, vtrace
from tests.seeds import seeded, torch_seeded

WIDE = {"name": "ratio", "weight": "none", "reject": "ratio", "over": "mean", "low": 0.5, "high": 3.0}
LOSSES: dict[str, Any] = {
    "ppo": ppo,
    "ppo dual": partial(ppo, clip=0.1, clip_high=0.3, dual_clip=1.2),
    "decoupled": capped(decoupled_ppo),
    "decoupled clamp": ratio(partial(decoupled_ppo, clip_high=0.28, dual_clip=1.5), weight_high=1.1),
    "decoupled uncapped": ratio(decoupled_ppo),
    "decoupled interpolated": capped(partial(decoupled_ppo, proximal="interpolate")),
    "decoupled alone": decoupled_ppo,
    "icepop": icepop(decoupled_ppo, low=0.8, high=1.3),
    "gspo": partial(gspo, clip=0.1, clip_high=0.2),
    "gspo decoupled": icepop(partial(gspo, clip=0.1, proximal="recompute", average=True), low=0.6, high=1.8),
    "sapo": partial(sapo, temperature=2.0, temperature_negative=3.0),
    "reinforce": reinforce,
    "is_pg": exact(reinforce),
    "is_pg token": exact(reinforce, weight="token"),
    "is_pg normalised": ratio(reinforce, self_normalise=True, weight="geometric"),
    "tis": tis(reinforce, weight_high=1.2),
    "cispo": cispo(reinforce, weight_low=0.7, weight_high=1.2),
    "topr": topr(reinforce),
    "vespo": vespo,
    "seq_tis": seq_tis(decoupled_ppo),
    "seq_mis": seq_mis(reinforce),
    "geo_mask": geo_mask(vespo, low=0.8, high=1.2),
    "sequence_mask": sequence_mask(sapo, high=0.1),
    "kpop": kpop(decoupled_ppo, high=0.1),
    "mis_po": mis_po(reinforce, low=0.3, high=4.0, correction={**WIDE, "pair": "behaviour_proximal"}),
    "vtrace": vtrace,
    "vtrace wide": partial(vtrace, rho_bar=1.3, c_bar=1.1),
    "ppo rejecting": ratio(ppo, weight="none", reject="k3", over="mean", high=0.2),
    "ppo dropping": ratio(ppo, weight="none", reject="ratio", over="max", high=2.0, rejected="drop"),
    "m2po rejecting": ratio(m2po, weight="none", reject="binary_kl", high=0.1),
    "dg corrected": tis(partial(dg, gate_temperature=0.5)),
    "dg_kondo corrected": tis(partial(dg_kondo, keep=0.3)),
    "tpo rejecting": ratio(tpo, weight="none", reject="k2", over="sum", high=0.5),
    "m2po": m2po,
    "dppo": partial(dppo, tv=0.05, tv_high=0.03),
    "dg": partial(dg, gate_temperature=0.5, gate_threshold=0.1),
    "dg hard": partial(dg, gate_temperature=0.0),
    "dg bernoulli": partial(dg, bernoulli=True),
    "dg_kondo": partial(dg_kondo, keep=0.3),
    "pmpo": pmpo,
    "tpo": partial(tpo, temperature=0.7),
    "sft": sft,
}
_known = {getattr(getattr(loss, "loss", loss), "func", getattr(loss, "loss", loss)) for loss in LOSSES.values()}
LOSSES |= {name: bind("loss", {"name": name}) for name in COMPONENTS["loss"] if resolve("loss", name) not in _known}

POLICY_GRADIENT = [name for name in LOSSES if not name.startswith(("dg", "pmpo", "tpo", "sft"))]
"""Losses whose gradient on-policy is − Σ A ∇log π ÷ denominator."""

LENGTH = 6
"""Tokens per sequence; two sequences are a group."""


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
        uniform=torch.tensor(rng.random(tokens)),
    )


def rows(batch: LossBatch, index: torch.Tensor) -> LossBatch:
    """Some of the tokens."""
    values = {field.name: getattr(batch, field.name) for field in fields(LossBatch)}
    return LossBatch(**{name: None if value is None else value[index] for name, value in values.items()})


def pieces_of(batch: LossBatch, counts: list[int]) -> list[LossBatch]:
    """The batch in pieces of this many sequences, in shuffled order; each piece numbers its sequences from 0."""
    number = int(batch.sequence.max()) + 1
    pieces = []
    for chosen in torch.randperm(number, generator=torch_seeded(3)).split(counts):
        index = torch.cat([torch.nonzero(batch.sequence == s)[:, 0] for s in chosen])
        piece = rows(batch, index)
        pieces.append(replace(piece, sequence=piece.sequence.unique(return_inverse=True)[1]))
    return pieces


def arrays(batch: LossBatch) -> tuple[np.ndarray, ...]:
    """Arrays of the trained tokens: current, behaviour, proximal, advantages."""
    assert batch.proximal is not None
    tensors = (batch.current, batch.behaviour, batch.proximal, batch.advantages)
    return tuple(t.detach().numpy()[batch.mask.numpy()] for t in tensors)


def value_and_gradient(loss: Any, batch: LossBatch, denominator: float) -> tuple[float, np.ndarray, dict[str, Any]]:
    """A loss after its plan: its value, its gradient by the trained tokens' logprobs, and its observations."""
    value, observed = loss(with_plan(loss, batch), denominator)
    (gradient,) = torch.autograd.grad(value, batch.current)
    mask = batch.mask
    assert not gradient[~mask].any()
    return value.item(), gradient[mask].numpy(), {name: v[mask].double().numpy() for name, v in observed.items()}
