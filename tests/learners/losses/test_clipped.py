"""The clipped losses against NumPy written from the formulas, case by case."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from learners.losses.clipped import clipped_surrogate, decoupled_ppo, gspo, interpolated, ppo
from learners.losses.contract import needs_proximal
from learners.losses.corrections import capped, icepop
from learners.losses.corrections import ratio as weighed
from tests.learners.losses.token_batches import LENGTH, arrays, batch_of, value_and_gradient


def truth_of_clip(ratio, advantage, low, high, dual=None):
    """One token's objective and its derivative by the ratio, case by case."""
    if advantage >= 0:
        return (ratio * advantage, advantage) if ratio < 1 + high else ((1 + high) * advantage, 0.0)
    if ratio < 1 - low:
        return (1 - low) * advantage, 0.0
    if dual is not None and ratio > dual:
        return dual * advantage, 0.0
    return ratio * advantage, advantage


@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, None, None), (0.1, 0.3, None), (0.2, 0.28, 1.3)])
def test_ppo_is_the_clipped_surrogate_of_current_over_behaviour(low, high, dual):
    batch = batch_of()
    loss, gradient, seen = value_and_gradient(partial(ppo, clip=low, clip_high=high, dual_clip=dual), batch, 7.0)
    current, behaviour, _, advantages = arrays(batch)
    ratio = np.exp(current - behaviour)
    cases = [
        truth_of_clip(r, a, low, low if high is None else high, dual) for r, a in zip(ratio, advantages, strict=True)
    ]
    value, slope = np.array(cases).T
    assert loss == pytest.approx(-value.sum() / 7, rel=1e-12)
    np.testing.assert_allclose(gradient, -slope * ratio / 7, rtol=1e-12)
    np.testing.assert_array_equal(seen["clip_share"], slope == 0)
    assert np.count_nonzero(slope == 0) > 3
    np.testing.assert_allclose(seen["ratio"], ratio)


@pytest.mark.parametrize("mode", ["mask", "clamp"])
def test_decoupled_ppo_weighs_by_proximal_over_behaviour_and_clips_current_over_proximal(mode):
    batch = batch_of(seed=1)
    plain = partial(decoupled_ppo, clip=0.15)
    bound = capped(plain, high=1.4) if mode == "mask" else weighed(plain, weight_high=1.4)
    loss, gradient, seen = value_and_gradient(bound, batch, 5.0)
    current, behaviour, proximal, advantages = arrays(batch)
    weight, ratio = np.exp(proximal - behaviour), np.exp(current - proximal)
    used = np.where(weight > 1.4, 0.0 if mode == "mask" else 1.4, weight)
    value, slope = np.array([truth_of_clip(r, a, 0.15, 0.15) for r, a in zip(ratio, advantages, strict=True)]).T
    assert loss == pytest.approx(-(used * value).sum() / 5, rel=1e-12)
    np.testing.assert_allclose(gradient, -used * slope * ratio / 5, rtol=1e-12)
    np.testing.assert_array_equal(seen["masked_share" if mode == "mask" else "capped_share"], weight > 1.4)
    assert np.count_nonzero(weight > 1.4) > 3
    np.testing.assert_allclose(seen["behaviour_weight"], weight)


def test_interpolated_proximal_lies_between_behaviour_and_current_by_version():
    """Staleness 3 at the start of a step that makes the next version: 3 of 4 versions are past."""
    batch = batch_of()
    current, behaviour, _, advantages = arrays(batch)
    staleness = batch.staleness[batch.mask].numpy()
    truth = np.array([b + d / (d + 1) * (c - b) for c, b, d in zip(current, behaviour, staleness, strict=True)])
    np.testing.assert_allclose(interpolated(batch)[batch.mask].numpy(), truth, rtol=1e-12)
    weight, ratio = np.exp(truth - behaviour), np.exp(current - truth)
    value, slope = np.array([truth_of_clip(r, a, 0.2, 0.2) for r, a in zip(ratio, advantages, strict=True)]).T
    loss, gradient, _ = value_and_gradient(weighed(partial(decoupled_ppo, proximal="interpolate")), batch, 5.0)
    assert loss == pytest.approx(-(weight * value).sum() / 5, rel=1e-12)
    np.testing.assert_allclose(gradient, -weight * slope * ratio / 5, rtol=1e-12)


def test_interpolation_is_exact_where_the_policy_moves_evenly():
    """log π(v) is linear in v: the interpolated policy is the one at the start of the step."""
    batch = batch_of(masked=0.0)
    drift = batch.proximal - batch.behaviour
    per_version = torch.where(batch.staleness > 0, drift / batch.staleness, 0.1)
    batch.current = batch.behaviour + per_version * (batch.staleness + 1)
    expected = torch.where(batch.staleness > 0, batch.proximal, batch.behaviour)
    torch.testing.assert_close(interpolated(batch), expected)


def test_icepop_leaves_out_tokens_whose_weight_is_outside_its_band():
    batch = batch_of(seed=2)
    current, behaviour, proximal, advantages = arrays(batch)
    weight, ratio = np.exp(proximal - behaviour), np.exp(current - proximal)
    used = np.array([w if 0.8 <= w <= 1.3 else 0.0 for w in weight])
    value, slope = np.array([truth_of_clip(r, a, 0.2, 0.2) for r, a in zip(ratio, advantages, strict=True)]).T
    loss, gradient, seen = value_and_gradient(icepop(decoupled_ppo, low=0.8, high=1.3), batch, 5.0)
    assert loss == pytest.approx(-(used * value).sum() / 5, rel=1e-12)
    np.testing.assert_allclose(gradient, -used * slope * ratio / 5, rtol=1e-12)
    assert (weight > 1.3).any() and (weight < 0.8).any()
    np.testing.assert_array_equal(seen["masked_share"], used == 0)


def test_gspo_clips_the_geometric_mean_of_a_sequence():
    batch = batch_of(seed=4)
    value, expected, cases = 0.0, np.zeros(60), set()
    for start in range(0, 60, LENGTH):
        members = [t for t in range(start, start + LENGTH) if batch.mask[t]]
        moved = [batch.current[t].item() - batch.behaviour[t].item() for t in members]
        ratio = float(np.exp(np.mean(moved)))
        objective, slope = truth_of_clip(ratio, batch.advantages[start].item(), 0.1, 0.2)
        value += len(members) * objective  # once per token; each token's logprob moves the ratio by ratio / length
        expected[members] = slope * ratio
        cases.add(slope == 0)
    loss, gradient, _ = value_and_gradient(partial(gspo, clip=0.1, clip_high=0.2), batch, 9.0)
    assert loss == pytest.approx(-value / 9, rel=1e-12) and cases == {True, False}
    np.testing.assert_allclose(gradient, -expected[batch.mask.numpy()] / 9, rtol=1e-12)


def test_gspo_with_sequence_means_is_the_papers_mean_over_sequences():
    batch = batch_of(masked=0.0)
    batch.share = torch.full((60,), 1 / LENGTH, dtype=torch.float64)
    ratios = (batch.current - batch.behaviour).detach().view(-1, LENGTH).mean(1).exp().numpy()
    objectives = [truth_of_clip(r, a, 3e-4, 4e-4)[0] for r, a in zip(ratios, batch.advantages[::LENGTH], strict=True)]
    assert value_and_gradient(gspo, batch, 10.0)[0] == pytest.approx(-np.mean(objectives))


def test_gspo_can_average_the_advantages_of_a_sequence_first():
    """As AReaL does; with one advantage per sequence it changes nothing."""
    batch = batch_of(seed=5)
    same = [value_and_gradient(partial(gspo, clip=0.3, average=average), batch, 9.0)[:2] for average in (False, True)]
    assert same[0][0] == pytest.approx(same[1][0], rel=1e-12)
    np.testing.assert_allclose(same[0][1], same[1][1], rtol=1e-12)
    batch.advantages = batch.current.detach() - batch.behaviour
    value, expected = 0.0, np.zeros(60)
    for start in range(0, 60, LENGTH):
        members = [t for t in range(start, start + LENGTH) if batch.mask[t]]
        advantage = float(np.mean([batch.advantages[t].item() for t in members]))
        objective, slope = truth_of_clip(float(np.exp(advantage)), advantage, 0.1, 0.1)
        value += len(members) * objective
        expected[members] = slope * np.exp(advantage)
    loss, gradient, _ = value_and_gradient(partial(gspo, clip=0.1, clip_high=None, average=True), batch, 9.0)
    assert loss == pytest.approx(-value / 9, rel=1e-12)
    np.testing.assert_allclose(gradient, -expected[batch.mask.numpy()] / 9, rtol=1e-12)
    unasked, each = (
        value_and_gradient(partial(gspo, clip=0.1, **knobs), batch, 9.0)[0] for knobs in ({}, {"average": False})
    )
    assert unasked == each != pytest.approx(loss), "each token keeps its own unless asked"


def test_gspo_can_be_decoupled_from_the_behaviour_policy():
    batch = batch_of(seed=6)
    around = replace(batch, behaviour=batch.proximal)
    loss, gradient, _ = value_and_gradient(partial(gspo, clip=0.1, proximal="recompute"), batch, 9.0)
    expected, truth, _ = value_and_gradient(partial(gspo, clip=0.1), around, 9.0)
    assert loss == expected
    np.testing.assert_array_equal(gradient, truth)


def test_no_gradient_flows_into_the_behaviour_weight():
    for loss in (capped(decoupled_ppo), icepop(decoupled_ppo)):
        batch = batch_of()
        batch.proximal.requires_grad_()
        loss(batch, 1.0)[0].backward()
        assert batch.proximal.grad is None


def test_losses_say_whether_they_want_proximal_logprobs():
    assert needs_proximal(decoupled_ppo) and needs_proximal(partial(decoupled_ppo, clip=0.1))
    assert needs_proximal(partial(gspo, proximal="recompute")) and not needs_proximal(gspo)
    assert not needs_proximal(ppo) and not needs_proximal(partial(ppo, clip=0.1))
    assert not needs_proximal(partial(decoupled_ppo, proximal="interpolate"))
    batch = batch_of()
    batch.proximal = None
    for loss in (decoupled_ppo, icepop(decoupled_ppo), partial(gspo, proximal="recompute")):
        with pytest.raises(ValueError, match="proximal"):
            loss(batch, 1.0)


@pytest.mark.parametrize("knobs", [{"clip": 0.0}, {"clip": 1.5}, {"clip_high": -0.1}, {"dual_clip": 1.0}])
def test_senseless_clips_are_refused(knobs):
    for loss in (ppo, decoupled_ppo):
        with pytest.raises(ValueError, match=next(iter(knobs))):
            loss(batch_of(), 1.0, **knobs)


def test_other_senseless_knobs_are_refused():
    for loss in (decoupled_ppo, gspo):
        with pytest.raises(ValueError, match="proximal"):
            loss(batch_of(), 1.0, proximal="guess")


def test_at_the_very_bounds_a_token_still_has_its_gradient():
    """Binary fractions, so that ratio and bound are equal: the papers' minimum is not flat before it is passed."""
    ratio = torch.tensor([1.25, 0.75, 1.5, 1.5 + 1e-9], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    objective, flat = clipped_surrogate(ratio, advantages, 0.25, None, dual_clip=1.5)
    assert flat.tolist() == [False, False, False, True]
    assert objective.tolist() == [1.25, -0.75, -1.5, -1.5]


@pytest.mark.parametrize("advantage", [0.0, 2.0])
def test_the_dual_clip_is_for_negative_advantages_alone(advantage):
    objective, flat = clipped_surrogate(torch.tensor([9.0, 0.1]), torch.full((2,), advantage), 0.2, None, dual_clip=1.5)
    assert objective.tolist() == pytest.approx([1.2 * advantage, 0.1 * advantage])
    assert flat.tolist() == [advantage > 0, False]
