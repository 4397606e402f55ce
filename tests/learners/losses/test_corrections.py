"""Corrections against plain loops over float64: factors, what they make of a loss, and what leaves the batch."""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from areal_like.config.registry import COMPONENTS, bind
from learners.losses.clipped import decoupled_ppo, gspo, ppo
from learners.losses.contract import LossBatch, leaves_out, needs_proximal, plan_of, planned_for, with_plan
from learners.losses.corrections import Corrected, capped, none, ratio, sequence_mask, tis
from learners.losses.delightful import dg
from learners.losses.targets import target_weights, tpo
from learners.losses.weighted import reinforce
from tests.learners.losses.token_batches import batch_of, value_and_gradient

MEASURES = {
    "ratio": lambda d, p, q: d,
    "k1": lambda d, p, q: -d,
    "k2": lambda d, p, q: d * d / 2,
    "k3": lambda d, p, q: math.exp(d) - 1 - d,
    "k3_reverse": lambda d, p, q: math.exp(-d) - 1 + d,
    "binary_kl": lambda d, p, q: max(bernoulli_kl(p, q), bernoulli_kl(q, p)),
}
AGGREGATES = {"sum": sum, "mean": np.mean, "max": max, "min": min}


def bernoulli_kl(p: float, q: float) -> float:
    p, q = (min(each, 1 - 1e-8) for each in (p, q))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def truth(batch: LossBatch, knobs: dict) -> tuple[np.ndarray, np.ndarray]:
    """Factors of the tokens [N], token by token, and which are rejected; masked tokens have the factor 1."""
    known = {"behaviour": batch.behaviour, "proximal": batch.proximal, "current": batch.current.detach()}
    earlier, later = (known[name].numpy() for name in knobs["pair"].split("_"))
    mask, advantages = batch.mask.numpy(), batch.advantages.numpy()
    factors, rejected = np.ones(len(mask)), np.zeros(len(mask), bool)
    for t in np.flatnonzero(mask):
        if knobs.get("where") == "negative" and advantages[t] >= 0:
            continue
        own = [i for i in np.flatnonzero(mask) if batch.sequence[i] == batch.sequence[t]]
        moved = {i: later[i] - earlier[i] for i in own}
        weight = {
            "none": 1.0,
            "token": math.exp(moved[t]),
            "sequence": math.exp(sum(moved.values())),
            "geometric": math.exp(np.mean(list(moved.values()))),
        }[knobs.get("weight", "token")]
        factors[t] = min(max(weight, knobs.get("weight_low", 0.0)), knobs.get("weight_high", math.inf))
        if "reject" in knobs:
            measure = MEASURES[knobs["reject"]]
            values = {i: measure(moved[i], math.exp(later[i]), math.exp(earlier[i])) for i in own}
            over = knobs.get("over", "token")
            found = values[t] if over == "token" else AGGREGATES[over](list(values.values()))
            found = math.exp(found) if knobs["reject"] == "ratio" else found
            if not knobs.get("low", -math.inf) <= found <= knobs.get("high", math.inf):
                factors[t], rejected[t] = 0.0, True
    return factors, rejected


BOUNDS = {"ratio": {"low": 0.8, "high": 1.3}, "k1": {"low": -0.25, "high": 0.25}}
LOW = {"high": 0.002}
PAIRS = ("behaviour_proximal", "proximal_current", "behaviour_current")
CASES = [
    {"pair": pair, "weight": weight, "weight_low": 0.85, "weight_high": 1.2}
    for pair, weight in product(PAIRS, ("token", "sequence", "geometric"))
] + [
    {
        "pair": PAIRS[n % 3],
        "weight": "none",
        "reject": what,
        "over": over,
        **BOUNDS.get(what, LOW if over == "min" else {"high": 0.07}),
    }
    for n, (what, over) in enumerate(product(MEASURES, ("token", "sum", "mean", "max", "min")))
]
CASES += [
    {"pair": "behaviour_current", "weight": "sequence", "weight_high": 1.0, "where": "negative"},
    {"pair": "behaviour_current", "weight": "none", "reject": "k1", "over": "mean", "high": 0.1, "where": "negative"},
    {"pair": "behaviour_proximal", "weight": "token", "reject": "ratio", "over": "max", "high": 1.5},
    {"pair": "behaviour_proximal", "weight": "geometric", "reject": "ratio", "over": "min", "low": 0.8, "high": None},
]
named = [" ".join(str(value) for value in case.values()) for case in CASES]


@pytest.mark.parametrize("knobs", CASES, ids=named)
def test_factors_are_those_of_plain_loops(knobs):
    batch = batch_of(seed=7)
    factors, rejected = truth(batch, {knob: value for knob, value in knobs.items() if value is not None})
    found, seen = ratio(reinforce, **knobs).factors(batch)
    np.testing.assert_allclose(found.numpy(), factors, rtol=1e-10)
    if "reject" in knobs:
        np.testing.assert_array_equal(seen["masked_share"].numpy(), rejected)
        assert rejected.any()
    else:
        assert (seen["capped_share"].numpy()[batch.mask.numpy()]).any()
    value, gradient, _ = value_and_gradient(ratio(reinforce, **knobs), batch, 7.0)
    mask, current = batch.mask.numpy(), batch.current.detach().numpy()
    pulls = (-factors * batch.advantages.numpy() / 7)[mask]
    np.testing.assert_allclose(gradient, pulls, rtol=1e-10)
    assert value == pytest.approx(float(pulls @ current[mask]), rel=1e-10)


@pytest.mark.parametrize(
    "loss", [decoupled_ppo, dg, partial(gspo, proximal="recompute", clip=0.5)], ids=["ppo", "dg", "gspo"]
)
def test_a_factor_multiplies_the_gradient_of_any_loss(loss):
    batch = batch_of(seed=8)
    _, plain, _ = value_and_gradient(loss, batch, 7.0)
    weighed = ratio(loss, pair="behaviour_proximal", weight_high=1.2)
    _, gradient, _ = value_and_gradient(weighed, batch, 7.0)
    factors, _ = truth(batch, {"pair": "behaviour_proximal", "weight_high": 1.2})
    if loss is decoupled_ppo or loss is dg:
        np.testing.assert_allclose(gradient, factors[batch.mask.numpy()] * plain, rtol=1e-12)
    else:  # a token moves its whole sequence's ratio: its gradient has the mean of the factors
        sequence = batch.sequence[batch.mask].numpy()
        mean = np.array([factors[batch.mask.numpy()][sequence == s].mean() for s in sequence])
        np.testing.assert_allclose(gradient, mean * plain, rtol=1e-12)


@pytest.mark.parametrize("loss", [ppo, decoupled_ppo, dg, reinforce, gspo], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize(
    "knobs",
    [
        {"reject": "ratio", "low": 0.0, "high": math.inf},
        {"reject": "k1", "low": -math.inf, "high": math.inf},
        *({"reject": kind, "high": math.inf} for kind in ("k2", "k3", "k3_reverse", "binary_kl")),
    ],
    ids=lambda knobs: knobs["reject"],
)
def test_infinite_bounds_are_the_plain_loss(loss, knobs):
    batch = batch_of(seed=9)
    expected, gradient, _ = value_and_gradient(loss, batch, 7.0)
    corrected = ratio(loss, weight="none", over="max", **knobs)
    value, found, seen = value_and_gradient(corrected, batch, 7.0)
    assert value == expected and not seen["masked_share"].any()
    np.testing.assert_array_equal(found, gradient)


def test_on_policy_no_correction_changes_anything():
    batch = batch_of(spread=0.0)
    same = replace(batch, behaviour=batch.current.detach(), proximal=batch.current.detach())
    expected, gradient, _ = value_and_gradient(reinforce, same, 7.0)
    for name in COMPONENTS["correction"]:
        spec = {"name": name, "high": 2.0, "reject": "ratio"} if name == "ratio" else name
        value, found, _ = value_and_gradient(bind("loss", {"name": "reinforce", "correction": spec}), same, 7.0)
        assert value == pytest.approx(expected, rel=1e-12)
        np.testing.assert_allclose(found, gradient, rtol=1e-12)


def test_a_rejected_token_has_no_part_in_its_sequences_ratio():
    """As in AReaL, where rejection narrows the mask before GSPO's mean."""
    batch = batch_of(seed=4)
    rejecting = ratio(gspo, weight="none", pair="behaviour_proximal", reject="ratio", high=1.2)
    _, rejected = truth(batch, {"pair": "behaviour_proximal", "weight": "none", "reject": "ratio", "high": 1.2})
    without = replace(batch, mask=batch.mask & ~torch.tensor(rejected))
    expected, _ = gspo(without, 7.0)
    assert rejected.any() and rejecting(batch, 7.0)[0].item() == pytest.approx(expected.item(), rel=1e-12)


def test_corrections_within_a_correction_multiply():
    """MIS-PO's two bands, and a weight of another pair."""
    batch = batch_of(seed=10)
    outer = {"pair": "behaviour_current", "weight": "token", "weight_high": 1.3, "reject": "ratio", "low": 0.6}
    inner = {"pair": "behaviour_proximal", "weight": "geometric", "reject": "ratio", "over": "mean", "high": 1.1}
    both = ratio(reinforce, **outer, correction={"name": "ratio", **inner})
    expected = truth(batch, outer)[0] * truth(batch, inner)[0]
    found, seen = both.factors(batch)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10)
    mask = batch.mask.numpy()
    np.testing.assert_array_equal(seen["masked_share"].numpy()[mask], expected[mask] == 0)
    raw = truth(batch, {"pair": "behaviour_current"})[0] * truth(batch, {**inner, "high": math.inf})[0]
    np.testing.assert_allclose(seen["behaviour_weight"].numpy()[mask], raw[mask], rtol=1e-10)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_self_normalised_weights_have_the_mean_one_over_the_minibatch(level):
    batch = replace(batch_of(seed=11), share=torch.rand(60, dtype=torch.float64) + 0.5)
    knobs = {"pair": "behaviour_current", "weight": level, "weight_high": 1.5, "reject": "k2", "high": 0.3}
    found = with_plan(ratio(reinforce, **knobs, self_normalise=True), batch).factors.numpy()
    factors, rejected = truth(batch, knobs)
    counted = batch.mask.numpy() & ~rejected
    share = batch.share.numpy()[counted]
    factors[batch.mask.numpy()] *= share.sum() / (share * factors[counted]).sum()
    np.testing.assert_allclose(found[batch.mask.numpy()], factors[batch.mask.numpy()], rtol=1e-10)


def test_what_must_see_a_whole_minibatch_has_a_plan_and_other_corrections_none():
    for knobs, whole in (({"self_normalise": True}, True), ({}, False)):
        assert bool(plan_of(ratio(reinforce, **knobs))) == whole
    dropping = ratio(reinforce, weight="none", reject="k3", high=1.0, rejected="drop")
    assert plan_of(dropping).needs_current
    with pytest.raises(ValueError, match="plan"):
        dropping(batch_of(), 1.0)
    _, seen = planned_for(dropping, batch_of())
    assert seen["masked_share"].dtype == torch.bool


def test_the_plan_of_the_loss_does_not_see_tokens_that_leave():
    dropping = ratio(tpo, weight="none", reject="k3", high=0.02, rejected="drop")
    batch = batch_of(masked=0.0)
    batch.current = batch.current.detach()
    stays = dropping.factors(batch)[0] > 0
    assert 0 < stays.sum() < len(stays)
    weights = planned_for(dropping, batch)[0].weights
    assert torch.equal(weights, target_weights(replace(batch, mask=stays))[0])
    assert not torch.equal(weights, target_weights(batch)[0])


def test_of_several_corrections_one_is_enough():
    dropping = ratio(reinforce, weight="none", reject="k3", high=1.0, rejected="drop")
    staying = ratio(reinforce, weight="none", reject="k3", high=1.0)
    assert leaves_out(dropping) is leaves_out(tis(dropping)) is True
    assert leaves_out(staying) is leaves_out(tis(staying)) is leaves_out(reinforce) is False
    assert plan_of(tis(ratio(reinforce, self_normalise=True))) and not plan_of(tis(ratio(reinforce)))
    assert needs_proximal(tis(tis(dg, pair="behaviour_proximal")))
    interpolating = capped(sequence_mask(partial(decoupled_ppo, proximal="interpolate")))
    assert [link.pair for link in interpolating.links] == ["behaviour_proximal", "behaviour_current"]
    interpolating(replace(batch_of(), proximal=None), 1.0)


@pytest.mark.parametrize(
    ("knobs", "told"),
    [({}, False), ({"weight_low": 0.5}, True), ({"weight_high": 2.0}, True), ({"weight": "none"}, False)],
)
def test_which_weights_were_cut_is_told_where_there_is_a_bound(knobs, told):
    _, seen = ratio(reinforce, **knobs, reject="k3", high=9.0)(batch_of(), 1.0)
    assert ("capped_share" in seen) == told and ("behaviour_weight" in seen) == (knobs.get("weight") != "none")


def test_the_pair_is_what_the_losss_own_ratio_leaves():
    def pair(loss):
        return ratio(loss, weight="none", reject="k3", high=1.0).links[0].pair

    assert pair(decoupled_ppo) == pair(partial(gspo, proximal="recompute")) == "behaviour_proximal"
    assert pair(ppo) == pair(gspo) == pair(dg) == "behaviour_current"


def test_a_corrected_loss_has_the_marks_of_its_loss():
    assert none(ppo) is ppo
    assert not needs_proximal(tis(dg)) and needs_proximal(tis(dg, pair="behaviour_proximal"))
    assert not needs_proximal(capped(partial(decoupled_ppo, proximal="interpolate")))
    assert tis(dg).single_pass and tis(partial(dg, bernoulli=True)).needs_uniform
    both = capped(tis(dg))
    assert isinstance(both, Corrected) and both.loss is dg and len(both.links) == 2


@pytest.mark.parametrize(
    ("loss", "knobs", "told"),
    [
        (ppo, {}, "whole ratio to the behaviour policy"),
        (decoupled_ppo, {"pair": "behaviour_current"}, "count twice"),
        (partial(gspo, proximal="recompute"), {"pair": "proximal_current"}, "count twice"),
        (dg, {"weight": "none"}, "neither weighs nor rejects"),
        (dg, {"weight": "none", "reject": "k1", "high": 1.0, "weight_high": 2.0}, "no weight that it could bound"),
        (dg, {"high": 2.0}, "nothing is rejected"),
        (dg, {"rejected": "drop"}, "nothing is rejected"),
        (dg, {"reject": "k3"}, "needs a bound"),
        (dg, {"reject": "k3", "low": 0.1, "high": 1.0}, "no lower bound"),
        (dg, {"reject": "ratio", "high": 0.9}, "must enclose 1"),
        (dg, {"reject": "k1", "low": 0.1}, "must enclose 0"),
        (dg, {"weight_high": 0.9}, "must enclose 1"),
        (dg, {"weight": "word"}, "weight must be one of"),
        (dg, {"where": "nowhere"}, "where must be one of"),
        (dg, {"where": None}, "where must be one of"),
    ],
)
def test_senseless_knobs_are_refused(loss, knobs, told):
    with pytest.raises(ValueError, match=told):
        ratio(loss, **knobs)
