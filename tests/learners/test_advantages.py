"""Advantages against loops over groups, samples and tokens."""

import statistics
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learners.advantages import (
    Episodes,
    batch,
    discounted_sums,
    gae,
    group,
    marked,
    maxrl,
    reinforce_pp,
    rloo,
    turn,
    turns_of,
)
from tests.seeds import seeded


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


# Leave-one-out, maximum likelihood, batch


@given(st.lists(st.tuples(st.floats(-5, 5, width=16), st.integers(0, 3)), min_size=1, max_size=30))
def test_rloo_is_the_reward_minus_the_mean_of_the_others(pairs):
    rewards, groups = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    expected = []
    for i in range(len(pairs)):
        others = [rewards[j] for j in range(len(pairs)) if j != i and groups[j] == groups[i]]
        expected.append(rewards[i] - np.mean(others) if others else 0.0)
    np.testing.assert_allclose(rloo(rewards, groups), expected, atol=1e-9)


def test_maxrl_divides_by_the_groups_mean():
    advantages = maxrl(np.array([1.0, 0, 0, 0, 1, 1, 1, 0]), np.repeat([0, 1], 4), eps=0.0)
    np.testing.assert_allclose(advantages, [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1])
    with pytest.raises(ValueError, match="negative"):
        maxrl(np.array([-1.0]), np.array([0]))


@pytest.mark.parametrize("baseline", ["batch", "group"])
def test_batch_normalisation(baseline):
    rng = seeded(0)
    rewards, groups = rng.random(24), np.arange(24) // 6
    centred = rewards - (rewards.mean() if baseline == "batch" else rewards.reshape(4, 6).mean(1)[groups])
    np.testing.assert_allclose(batch(rewards, groups, baseline=baseline, std=False), centred)
    np.testing.assert_allclose(batch(rewards, groups, baseline=baseline), centred / (centred.std() + 1e-6))


@given(st.lists(st.tuples(st.floats(-5, 5, width=16), st.integers(0, 3)), min_size=1, max_size=30))
def test_the_sample_deviation_is_that_of_the_standard_library(pairs):
    """As TRL and verl divide; groups of one, or of equal rewards, get 0."""
    rewards, groups = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    expected = []
    for reward, name in pairs:
        own = [r for r, g in pairs if g == name]
        spread = statistics.stdev(own) if len(set(own)) > 1 else 1.0
        expected.append((reward - statistics.fmean(own)) / (spread + 1e-6) if len(set(own)) > 1 else 0.0)
    np.testing.assert_allclose(group(rewards, groups, std="sample"), expected, atol=1e-9, rtol=1e-6)
    np.testing.assert_array_equal(group(rewards, groups, std="population"), group(rewards, groups, std=True))


def test_a_group_of_eight_has_advantages_that_are_6_5_percent_smaller():
    rewards, groups = seeded(1).random(8), np.zeros(8, int)
    found = group(rewards, groups, std="sample", eps=0.0) / group(rewards, groups, std="population", eps=0.0)
    np.testing.assert_allclose(found, 0.935, atol=5e-4)
    with pytest.raises(ValueError, match="std must be"):
        group(rewards, groups, std="bessel")


@pytest.mark.parametrize("std", ["population", "sample"])
def test_a_batch_divides_by_the_deviation_of_its_rewards_if_asked(std):
    """TRL's scale_rewards="batch"; by hand, against the standard library."""
    rewards, groups = seeded(2).random(24) + np.arange(24) // 6, np.arange(24) // 6
    centred = rewards - rewards.reshape(4, 6).mean(1)[groups]
    spread = {"population": statistics.pstdev, "sample": statistics.stdev}[std]
    for of, values in (("centred", centred), ("rewards", rewards)):
        found = batch(rewards, groups, baseline="group", std=std, deviation_of=of)
        np.testing.assert_allclose(found, centred / (spread(values.tolist()) + 1e-6))


# Per token


def episodes(seed: int = 0, values: bool = False) -> Episodes:
    """Five samples of 1 to 5 trained tokens, one of them without any."""
    rng = seeded(seed)
    sample = np.repeat([0, 1, 3, 4], [5, 1, 3, 4])
    return Episodes(
        rewards=rng.random(5),
        groups=np.array([0, 0, 0, 1, 1]),
        sample=sample,
        penalties=rng.normal(0, 0.1, len(sample)),
        values=rng.normal(0, 1, len(sample)) if values else None,
    )


def test_penalties_reach_samples_as_sums_and_tokens_one_by_one():
    e = episodes()
    sums = [e.rewards[i] - e.penalties[e.sample == i].sum() for i in range(5)]
    np.testing.assert_allclose(e.per_sample(), sums)
    tokens = e.per_token(e.rewards)
    for i in (0, 1, 3, 4):
        assert tokens[e.sample == i].sum() == pytest.approx(sums[i])
        np.testing.assert_allclose(tokens[e.sample == i][:-1], -e.penalties[e.sample == i][:-1])


@pytest.mark.parametrize(("baseline", "gamma"), [(False, 1.0), (True, 1.0), (False, 0.9)])
def test_reinforce_pp_normalises_returns_over_the_batchs_tokens(baseline, gamma):
    e, returns = episodes(), []
    rewards = group(e.rewards, e.groups) if baseline else e.rewards
    for i in (0, 1, 3, 4):
        own = -e.penalties[e.sample == i]
        own[-1] += rewards[i]
        returns += [sum(gamma**k * r for k, r in enumerate(own[t:])) for t in range(len(own))]
    expected = (returns - np.mean(returns)) / (np.std(returns) + 1e-6)
    np.testing.assert_allclose(reinforce_pp(e, baseline=baseline, gamma=gamma), expected)
    assert marked(reinforce_pp, "per_token") and marked(partial(reinforce_pp, gamma=0.5), "per_token")


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_is_the_sum_of_discounted_temporal_differences(gamma, lam):
    e, expected = episodes(values=True), []
    for i in (0, 1, 3, 4):
        v, r = e.values[e.sample == i], -e.penalties[e.sample == i]
        r[-1] += e.rewards[i]
        delta = [r[t] + gamma * (v[t + 1] if t + 1 < len(v) else 0.0) - v[t] for t in range(len(v))]
        expected += [sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:])) for t in range(len(v))]
    np.testing.assert_allclose(gae(e, gamma=gamma, lam=lam), expected)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8)])
def test_gae_continues_behind_samples_that_were_cut(gamma, lam):
    e, expected = episodes(values=True), []
    e = replace(e, behind=np.array([0.7, 0.0, 0.0, -0.3, 0.0]))
    for i in (0, 1, 3, 4):
        v, r = [*e.values[e.sample == i], e.behind[i]], -e.penalties[e.sample == i]
        r[-1] += e.rewards[i]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        expected += [sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:])) for t in range(len(r))]
    np.testing.assert_allclose(gae(e, gamma=gamma, lam=lam, bootstrap=True), expected)
    np.testing.assert_array_equal(gae(e), gae(replace(e, behind=None)))
    with pytest.raises(ValueError, match="behind"):
        gae(replace(e, behind=None), bootstrap=True)


def test_gae_at_lambda_one_is_the_return_minus_the_value():
    e = episodes(values=True)
    returns = discounted_sums(e.per_token(e.rewards), e.last(), 1.0)
    np.testing.assert_allclose(gae(e), returns - e.values)


@pytest.mark.parametrize("discount", [1.0, 0.97])
def test_sums_of_few_long_samples_are_those_of_a_loop_bit_for_bit(discount):
    rng, lengths = seeded(5), [40, 1, 17]
    values = rng.normal(size=sum(lengths))
    last = np.isin(np.arange(len(values)), np.cumsum(lengths) - 1)
    expected = values.copy()
    for t in reversed(range(len(values) - 1)):
        expected[t] += 0.0 if last[t] else discount * expected[t + 1]
    assert (discounted_sums(values, last, discount) == expected).all(), "one by one"
    many = np.tile(values, 20), np.tile(last, 20)
    assert (discounted_sums(*many, discount) == np.tile(expected, 20)).all(), "all samples at once"


def test_gae_needs_values():
    with pytest.raises(ValueError, match="critic"):
        gae(episodes())


def test_no_tokens_no_advantages():
    empty = Episodes(np.ones(2), np.zeros(2, int), np.zeros(0, int), np.zeros(0), np.zeros(0))
    assert reinforce_pp(empty).shape == gae(empty).shape == (0,)


# Turns

# Sample 0: turns at places 0-1 and 4-5, the second followed by a filler that is trained here (place 6); sample 1: one
# turn; sample 2: no reward of a turn; sample 3: a turn whose tokens are not trained.
SAMPLE = np.array([0, 0, 0, 0, 0, 1, 1, 2, 3, 3])
PLACE = np.array([0, 1, 4, 5, 6, 0, 1, 0, 3, 4])
PAIRS = [[(1, 0.25), (5, 0.5)], [(1, 1.0)], [], [(1, 0.125), (4, 0.25)]]


def test_each_turn_earns_at_its_last_trained_token():
    turns = turns_of(PAIRS, SAMPLE, PLACE)
    assert turns is not None
    assert turns.earned.tolist() == [0, 0.25, 0, 0.5, 0, 0, 1.0, 0, 0.125, 0.25]
    assert turns.number.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert turns_of([[], []], np.array([0, 1]), np.array([0, 0])) is None


def test_rewards_per_token_sum_to_the_samples_rewards():
    rewards = np.array([1.0, 0.75, 0.5, 0.375])  # the overlong penalty, say, has changed those of samples 0 and 1
    episodes = Episodes(rewards, np.zeros(4, int), SAMPLE, np.zeros(10), turns=turns_of(PAIRS, SAMPLE, PLACE))
    tokens = episodes.per_token(rewards)
    np.testing.assert_allclose(np.bincount(SAMPLE, tokens), rewards)
    np.testing.assert_allclose(tokens[:5], [0, 0.25, 0, 0.5, 0.25])


def test_credit_by_turns_against_a_loop():
    rewards, groups = np.array([0.75, 1.0, 0.5, 0.375]), np.array([7, 7, 7, 8])
    episodes = Episodes(rewards, groups, SAMPLE, np.zeros(10), turns=turns_of(PAIRS, SAMPLE, PLACE))
    # Return from each turn on: sample 0: 0.75, 0.5; sample 1: 1; sample 2: 0.5; sample 3 (alone): nothing above.
    first = (0.75 + 1.0 + 0.5) / 3
    expected = [0.75 - first] * 2 + [0.0] * 3 + [1 - first] * 2 + [0.5 - first] + [0.0] * 2
    np.testing.assert_allclose(turn(episodes), expected, atol=1e-12)


def test_discount_is_per_turn():
    pairs = [[(0, 0.0), (1, 1.0)], [(0, 0.0), (1, 0.0)]]
    sample, place = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    turns = turns_of(pairs, sample, place)
    episodes = Episodes(np.array([1.0, 0.0]), np.zeros(2, int), sample, np.zeros(4), turns=turns)
    np.testing.assert_allclose(turn(episodes, gamma=0.5), [0.25, 0.5, -0.25, -0.5])


@given(st.lists(st.tuples(st.floats(-5, 5, width=16), st.integers(0, 2)), min_size=1, max_size=9))
def test_without_turns_it_is_group(pairs):
    rewards, groups = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    sample = np.repeat(np.arange(len(pairs)), 2)
    episodes = Episodes(rewards, groups, sample, np.zeros(len(sample)))
    np.testing.assert_allclose(turn(episodes), group(rewards, groups)[sample], atol=1e-12)


def test_gae_sees_rewards_where_they_were_earned():
    turns = turns_of([[(0, 1.0), (1, 0.0)]], np.array([0, 0]), np.array([0, 1]))
    episodes = Episodes(np.array([1.0]), np.zeros(1, int), np.array([0, 0]), np.zeros(2), np.zeros(2), turns)
    np.testing.assert_allclose(gae(episodes), [1.0, 0.0])
