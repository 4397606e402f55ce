"""PMPO against its two means, TPO against the gradient of the cross-entropy."""

from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
import torch

from learners.losses.contract import with_plan
from learners.losses.targets import pmpo, preference_weights, target_weights, tpo
from tests.learners.losses.token_batches import LENGTH, arrays, batch_of, value_and_gradient


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.1), (0.9, 0.0), (0.0, 1.0)])
def test_pmpo_is_two_means_of_logprobs_and_a_divergence(alpha, beta):
    batch = batch_of()
    current, behaviour, _, advantages = arrays(batch)
    good, bad, n = advantages > 0, advantages < 0, len(advantages)
    objective = alpha * current[good].mean() - (1 - alpha) * current[bad].mean() - beta * np.mean(behaviour - current)
    slope = np.where(good, alpha / good.sum(), 0) - np.where(bad, (1 - alpha) / bad.sum(), 0) + beta / n
    value, gradient, _ = value_and_gradient(partial(pmpo, alpha=alpha, beta=beta), batch, float(n))
    assert value == pytest.approx(-objective)
    np.testing.assert_allclose(gradient, -slope, rtol=1e-12)


def test_pmpo_with_sequence_means_takes_means_over_sequences():
    batch = batch_of(masked=0.0)
    batch.share = torch.full((60,), 1 / LENGTH, dtype=torch.float64)
    means = batch.current.detach().view(-1, LENGTH).mean(1).numpy()
    advantages = batch.advantages[::LENGTH].numpy()
    objective = 0.5 * means[advantages > 0].mean() - 0.5 * means[advantages < 0].mean()
    assert value_and_gradient(partial(pmpo, beta=0.0), batch, 10.0)[0] == pytest.approx(-objective)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_pmpo_without_one_of_the_signs(sign):
    batch = batch_of()
    batch.advantages = sign * batch.advantages.abs()
    value, gradient, _ = value_and_gradient(partial(pmpo, beta=0.0), batch, 48.0)
    assert np.isfinite(value) and np.all(np.sign(gradient) == -sign)


def cross_entropy(current: torch.Tensor, batch, temperature: float) -> torch.Tensor:
    """TPO's loss: −Σ q log p over the two sequences of a group, averaged over groups."""
    losses = []
    for first in range(0, len(batch.mask), 2 * LENGTH):
        members = [slice(s, s + LENGTH) for s in (first, first + LENGTH)]
        now = torch.stack([current[m][batch.mask[m]].sum() for m in members])
        old = torch.stack([batch.behaviour[m][batch.mask[m]].sum() for m in members])
        score = torch.stack([batch.advantages[m][0] for m in members])
        z = (score - score.mean()) / score.std(unbiased=False) if score[0] != score[1] else torch.zeros(2)
        q = torch.softmax(old + z / temperature, 0)
        losses.append(-(q * torch.log_softmax(now, 0)).sum())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_tpo_has_the_gradient_of_the_cross_entropy_to_its_target(temperature):
    batch = batch_of()
    batch.advantages[: 2 * LENGTH] = 0.7  # a group whose scores are equal
    expected = torch.autograd.grad(cross_entropy(batch.current, batch, temperature), batch.current)[0][batch.mask]
    _, gradient, _ = value_and_gradient(partial(tpo, temperature=temperature), batch, float(batch.mask.sum()))
    np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-15)


def test_the_numbers_of_a_minibatchs_groups_may_begin_anywhere():
    batch = batch_of()
    batch.current = batch.current.detach()
    later = replace(batch, group=batch.group + 3)
    assert torch.equal(target_weights(later)[0], target_weights(batch)[0])


def test_a_sequence_without_a_trained_token_has_no_part_in_any_target():
    batch = batch_of(masked=0.0)
    batch.current = batch.current.detach()
    rest = replace(batch, mask=batch.mask & (batch.sequence != 0))
    whole, left = (target_weights(each)[1]["target_gap"] for each in (batch, rest))
    assert not left[: 2 * LENGTH].any(), "the other sequence of its group is alone"
    assert torch.equal(left[2 * LENGTH :], whole[2 * LENGTH :]) and whole[: 2 * LENGTH].all()


def test_a_target_that_is_nearly_certain_stays_finite():
    batch = batch_of()
    batch.current = batch.current.detach()
    weights, seen = target_weights(batch, temperature=1e-3)
    assert torch.isfinite(weights).all() and 0.0 < seen["target_gap"].max() <= 1.0


def test_tpo_rests_at_its_target():
    """The behaviour is such that the target is the current policy: z is ±1, so the sums must differ by 2 less."""
    batch = batch_of(masked=0.0)
    behaviour = batch.current.detach().clone()
    for first in range(0, 60, 2 * LENGTH):
        better = first if batch.advantages[first] > batch.advantages[first + LENGTH] else first + LENGTH
        behaviour[better] -= 2.0
    at_rest, current = replace(batch, behaviour=behaviour), batch.current.detach()
    np.testing.assert_allclose(value_and_gradient(tpo, at_rest, 60.0)[1], 0.0, atol=1e-12)
    np.testing.assert_allclose(target_weights(replace(at_rest, current=current))[1]["target_gap"], 0.0, atol=1e-12)
    assert target_weights(replace(batch, current=current))[1]["target_gap"].max() > 0.1


@pytest.mark.parametrize("weigh", [target_weights, preference_weights])
def test_plans_ask_the_device_nothing(weigh):
    """On the meta device there are no values, so whatever asks for one fails."""
    batch = batch_of()
    known = {each.name: getattr(batch, each.name) for each in fields(batch)}
    there = {name: x.detach().to("meta") if isinstance(x, torch.Tensor) else x for name, x in known.items()}
    weights, _ = weigh(replace(batch, **there | {"sequences": int(batch.sequence.max()) + 1}))
    assert weights.shape == batch.mask.shape and weights.is_meta


def test_senseless_knobs_are_refused():
    for loss, knobs in ((pmpo, {"alpha": 1.5}), (pmpo, {"beta": -1.0}), (tpo, {"temperature": 0.0})):
        with pytest.raises(ValueError, match=next(iter(knobs))):
            with_plan(partial(loss, **knobs), batch_of())
    with pytest.raises(ValueError, match="group"):
        with_plan(tpo, replace(batch_of(), group=None))
