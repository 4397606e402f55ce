"""The weighted losses against NumPy: each token's gradient is − weight · advantage ÷ denominator."""

from functools import partial

import numpy as np
import pytest

from learners.losses.corrections import cispo, exact, tis
from learners.losses.weighted import reinforce, vtrace
from tests.learners.losses.token_batches import LENGTH, arrays, batch_of, value_and_gradient


def check(loss, weight, batch, seen_ratio=None):
    current, _, _, advantages = arrays(batch)
    value, gradient, seen = value_and_gradient(loss, batch, 7.0)
    np.testing.assert_allclose(gradient, -weight * advantages / 7, rtol=1e-12)
    assert value == pytest.approx(-(weight * advantages * current).sum() / 7, rel=1e-12)
    if seen_ratio is not None:
        np.testing.assert_allclose(seen["behaviour_weight"], seen_ratio)
    return seen


def test_reinforce_corrects_for_nothing():
    batch = batch_of()
    check(reinforce, np.ones(int(batch.mask.sum())), batch)


def test_exact_weights_are_products_over_the_sequence():
    batch = batch_of(seed=1)
    current, behaviour, _, _ = arrays(batch)
    sequence = batch.sequence[batch.mask].numpy()
    tokens = np.exp(current - behaviour)
    products = np.array([np.prod(tokens[sequence == s]) for s in sequence])
    check(exact(reinforce), products, batch, products)
    check(exact(reinforce, weight="token"), tokens, batch, tokens)


def test_exact_weights_make_the_gradient_of_another_policy_unbiased():
    """Two-token sequences over two arms: the mean over ALL sequences under the behaviour policy is the current policy's
    gradient."""
    behaviour, current = np.array([0.8, 0.2]), np.array([0.3, 0.7])
    reward = np.array([[0.0, 1.0], [3.0, -2.0]])
    own = sum(current[a] * current[b] * reward[a, b] for a in (0, 1) for b in (0, 1))
    batch = batch_of(tokens=4 * LENGTH, masked=0.0)
    total = 0.0
    for n, (a, b) in enumerate((a, b) for a in (0, 1) for b in (0, 1)):
        here = slice(n * LENGTH, (n + 1) * LENGTH)
        batch.mask[here] = False
        batch.mask[n * LENGTH : n * LENGTH + 2] = True
        for t, arm in ((n * LENGTH, a), (n * LENGTH + 1, b)):
            batch.behaviour[t] = np.log(behaviour[arm])
            batch.current.data[t] = np.log(current[arm])
    seen = value_and_gradient(exact(reinforce), batch, 1.0)[2]["behaviour_weight"].reshape(4, 2)[:, 0]
    for n, (a, b) in enumerate((a, b) for a in (0, 1) for b in (0, 1)):
        total += behaviour[a] * behaviour[b] * seen[n] * reward[a, b]
    assert total == pytest.approx(own)


def test_tis_truncates_from_above_only():
    batch = batch_of(seed=2)
    current, behaviour, _, _ = arrays(batch)
    ratio = np.exp(current - behaviour)
    seen = check(tis(reinforce, weight_high=1.2), np.minimum(ratio, 1.2), batch, ratio)
    np.testing.assert_array_equal(seen["capped_share"], ratio > 1.2)
    assert 3 < np.count_nonzero(ratio > 1.2) < len(ratio) - 3


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    batch = batch_of(seed=3)
    current, behaviour, _, _ = arrays(batch)
    ratio = np.exp(current - behaviour)
    seen = check(cispo(reinforce, weight_low=0.7, weight_high=1.2), np.clip(ratio, 0.7, 1.2), batch, ratio)
    np.testing.assert_array_equal(seen["capped_share"], (ratio < 0.7) | (ratio > 1.2))
    assert (ratio < 0.7).any()
    check(cispo(reinforce, weight_high=1.2), np.minimum(ratio, 1.2), batch)


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (1.5, 1.1), (0.8, 1.3)])
def test_vtrace_is_impalas_recursion_with_a_constant_value(rho_bar, c_bar):
    """The targets of equation 1 computed backwards, then ρ (r + v of the next state − V): reward at the end, V = b."""
    batch, baseline = batch_of(seed=4), 0.37
    current, behaviour, _, advantages = arrays(batch)
    sequence, expected = batch.sequence[batch.mask].numpy(), np.empty(len(current))
    for s in set(sequence.tolist()):
        places = np.flatnonzero(sequence == s)
        reward = advantages[places[0]] + baseline
        target, following = 0.0, 0.0  # of the state behind the end, whose value is 0
        for t in reversed(places):
            ratio = np.exp(current[t] - behaviour[t])
            rho, c = min(ratio, rho_bar), min(ratio, c_bar)
            got = reward if t == places[-1] else 0.0
            expected[t] = rho * (got + target - baseline)
            delta = rho * (got + following - baseline)
            target = baseline + delta + c * (target - following)
            following = baseline
    _, gradient, _ = value_and_gradient(partial(vtrace, rho_bar=rho_bar, c_bar=c_bar), batch, 7.0)
    np.testing.assert_allclose(gradient, -expected / 7, rtol=1e-10)


@pytest.mark.parametrize("knobs", [{"rho_bar": 0.0}, {"c_bar": -1.0}])
def test_senseless_knobs_are_refused(knobs):
    with pytest.raises(ValueError, match=next(iter(knobs))):
        vtrace(batch_of(), 1.0, **knobs)
