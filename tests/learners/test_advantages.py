"""Group-relative advantages against a loop over groups."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learners.advantages import group


@given(st.lists(st.tuples(st.floats(-5, 5, width=16), st.integers(-3, 3)), min_size=1, max_size=40), st.booleans())
def test_equals_a_loop_over_groups(pairs, std):
    rewards, groups = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    expected = np.empty(len(pairs))
    for name in set(groups.tolist()):
        own = rewards[groups == name]
        difference = own - own.mean() if len(set(own.tolist())) > 1 else np.zeros(len(own))
        expected[groups == name] = difference / (own.std() + 1e-6) if std else difference
    np.testing.assert_allclose(group(rewards, groups, std=std), expected, atol=1e-9, rtol=1e-7)


def test_equal_rewards_give_exactly_zero():
    rewards = np.full(7, 0.1)
    assert not np.any(group(rewards, np.zeros(7, int)))
    assert not np.any(group(rewards, np.zeros(7, int), std=True))


def test_groups_do_not_mix():
    np.testing.assert_allclose(group(np.array([0, 10, 1, 20]), np.array([5, 9, 5, 9])), [-0.5, -5, 0.5, 5])


def test_std_gives_unit_scale_whatever_the_rewards_scale():
    small = group(np.array([0.0, 1e-2, 0.0, 1e-2]), np.zeros(4, int), std=True)
    np.testing.assert_allclose(small, [-1, 1, -1, 1], rtol=1e-3)


def test_a_reward_that_is_not_finite_is_not_hidden():
    assert np.isnan(group(np.array([np.nan, 1.0]), np.zeros(2, int))).all()


def test_no_samples_no_advantages():
    assert group(np.array([]), np.array([], int)).shape == (0,)
    assert pytest.approx(0.0) == group(np.array([3.0]), np.array([1]))[0]
