"""Losses and named corrections of the field against plain loops over their formulas, value and gradient."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from learners.losses.clipped import decoupled_ppo, ppo, sapo
from learners.losses.corrections import geo_mask, kpop, mis_po, seq_mis, seq_tis, sequence_mask, topr
from learners.losses.weighted import reinforce, vespo
from tests.learners.losses.test_clipped import truth_of_clip
from tests.learners.losses.test_corrections import bernoulli_kl
from tests.learners.losses.token_batches import arrays, batch_of, value_and_gradient


def sequences(batch) -> tuple[list[np.ndarray], np.ndarray]:
    """Places of each sequence's trained tokens among the trained tokens, and the sequence's number for each token."""
    owner = batch.sequence[batch.mask].numpy()
    return [np.flatnonzero(owner == s) for s in owner], owner


def check_score(loss, weight, batch):
    """A score function: the gradient is − weight · A ÷ denominator, the value that times log π."""
    current, _, _, advantages = arrays(batch)
    value, gradient, seen = value_and_gradient(loss, batch, 7.0)
    np.testing.assert_allclose(gradient, -weight * advantages / 7, rtol=1e-10)
    assert value == pytest.approx(-(weight * advantages * current).sum() / 7, rel=1e-10)
    return seen


@pytest.mark.parametrize(("positive", "negative"), [(1.0, 1.05), (2.0, 0.5)])
def test_sapo_is_a_sigmoid_of_the_ratio(positive, negative):
    batch = batch_of(seed=12)
    current, behaviour, _, advantages = arrays(batch)
    value, slope = 0.0, []
    for now, then, advantage in zip(current, behaviour, advantages, strict=True):
        tau, moved = positive if advantage > 0 else negative, math.exp(now - then)
        gate = 1 / (1 + math.exp(-tau * (moved - 1)))
        value -= 4 / tau * gate * advantage
        slope.append(-4 * gate * (1 - gate) * moved * advantage)
    loss, gradient, _ = value_and_gradient(
        partial(sapo, temperature=positive, temperature_negative=negative), batch, 7.0
    )
    assert loss == pytest.approx(value / 7, rel=1e-12)
    np.testing.assert_allclose(gradient, np.array(slope) / 7, rtol=1e-10)


def test_vespo_weighs_by_a_kernel_of_the_sequences_ratio():
    batch = batch_of(seed=13)
    current, behaviour, _, advantages = arrays(batch)
    own, _ = sequences(batch)
    weight = []
    for members, advantage in zip(own, advantages, strict=True):
        whole = math.prod(math.exp(current[i] - behaviour[i]) for i in members)
        k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        weight.append(whole**k * math.exp(rate * (1 - whole)))
    check_score(vespo, np.array(weight), batch)


def test_topr_truncates_the_weights_of_bad_sequences_only():
    """arXiv 2503.14286: weight 1 where A ≥ 0, the sequence's ratio within [0, 1] elsewhere."""
    batch = batch_of(seed=24)
    current, behaviour, _, advantages = arrays(batch)
    own, _ = sequences(batch)
    whole = np.array([math.prod(math.exp(current[i] - behaviour[i]) for i in members) for members in own])
    weight = np.where(advantages < 0, np.minimum(whole, 1.0), 1.0)
    check_score(topr(reinforce), weight, batch)
    assert ((weight < 1) & (advantages < 0)).any() and (weight[advantages < 0] == 1).any()


def test_seq_tis_and_seq_mis_truncate_or_reject_the_product():
    batch = batch_of(seed=15)
    current, behaviour, _, _ = arrays(batch)
    own, _ = sequences(batch)
    whole = np.array([math.prod(math.exp(current[i] - behaviour[i]) for i in members) for members in own])
    check_score(seq_tis(reinforce), np.minimum(whole, 2.0), batch)
    seen = check_score(seq_mis(reinforce), np.where(whole > 2.0, 0.0, whole), batch)
    np.testing.assert_array_equal(seen["masked_share"], whole > 2.0)
    assert (whole > 2).any() and (whole < 2).any()


def test_geo_mask_rejects_sequences_by_their_geometric_mean():
    batch = batch_of(seed=16)
    current, behaviour, proximal, advantages = arrays(batch)
    own, _ = sequences(batch)
    mean = np.array([math.exp(np.mean([proximal[i] - behaviour[i] for i in members])) for members in own])
    inside = (mean >= 0.9) & (mean <= 1.1)
    moved = np.exp(current - proximal)
    clipped, slope = np.array([truth_of_clip(r, a, 0.2, 0.2) for r, a in zip(moved, advantages, strict=True)]).T
    value, gradient, _ = value_and_gradient(geo_mask(decoupled_ppo, low=0.9, high=1.1), batch, 7.0)
    assert value == pytest.approx(-clipped[inside].sum() / 7, rel=1e-10)
    np.testing.assert_allclose(gradient, np.where(inside, -slope * moved / 7, 0.0), rtol=1e-10)
    assert inside.any() and not inside.all()


def test_kpop_rejects_tokens_whose_chance_has_moved_either_way():
    batch = batch_of(seed=17)
    current, behaviour, proximal, advantages = arrays(batch)
    pairs = [(math.exp(p), math.exp(b)) for p, b in zip(proximal, behaviour, strict=True)]
    apart = np.array([max(bernoulli_kl(p, q), bernoulli_kl(q, p)) for p, q in pairs])
    weight, moved = np.exp(proximal - behaviour), np.exp(current - proximal)
    clipped, slope = np.array([truth_of_clip(r, a, 0.2, 0.2) for r, a in zip(moved, advantages, strict=True)]).T
    value, gradient, seen = value_and_gradient(kpop(decoupled_ppo), batch, 7.0)
    assert value == pytest.approx(-(weight * clipped)[apart <= 0.05].sum() / 7, rel=1e-10)
    np.testing.assert_allclose(gradient, np.where(apart <= 0.05, -weight * slope * moved / 7, 0.0), rtol=1e-10)
    np.testing.assert_array_equal(seen["masked_share"], apart > 0.05)
    assert 3 < np.count_nonzero(apart > 0.05) < len(apart) - 3


def test_mis_po_keeps_what_is_near_as_if_it_were_on_policy():
    """Step 3.5 Flash (arXiv 2602.10604): both indicators, of the token and of its sequence, and no weight."""
    batch = batch_of(seed=18, spread=0.01)
    _, behaviour, proximal, _ = arrays(batch)
    behaviour[::9] += 1.0  # a few tokens far off
    batch.behaviour[batch.mask] = torch.tensor(behaviour)
    own, _ = sequences(batch)
    moved = proximal - behaviour
    token = np.exp(moved)
    mean = np.array([math.exp(np.mean(moved[members])) for members in own])
    kept = (token >= 0.5) & (token <= 2) & (mean >= 0.996) & (mean <= 1.001)
    check_score(mis_po(reinforce), kept.astype(float), batch)
    assert kept.any() and not kept.all()


def test_the_off_policy_sequence_mask_spares_good_answers():
    """DeepSeek-V3.2 (arXiv 2512.02556): A < 0 and the mean of log behaviour/current above a bound."""
    batch = batch_of(seed=29)
    current, behaviour, _, advantages = arrays(batch)
    own, _ = sequences(batch)
    drift = np.array([np.mean(behaviour[members] - current[members]) for members in own])
    out = (advantages < 0) & (drift > 0.1)
    moved = np.exp(current - behaviour)
    clipped, slope = np.array([truth_of_clip(r, a, 0.2, 0.2) for r, a in zip(moved, advantages, strict=True)]).T
    value, gradient, _ = value_and_gradient(sequence_mask(ppo, high=0.1), batch, 7.0)
    assert value == pytest.approx(-clipped[~out].sum() / 7, rel=1e-10)
    np.testing.assert_allclose(gradient, np.where(out, 0.0, -slope * moved / 7), rtol=1e-10)
    assert out.any() and ((advantages > 0) & (drift > 0.1)).any()


@pytest.mark.parametrize("loss", [partial(sapo, temperature=0.0), partial(sapo, temperature_negative=-1.0)])
def test_senseless_temperatures_are_refused(loss):
    with pytest.raises(ValueError, match="temperature"):
        loss(batch_of(), 1.0)
