"""Advantages against loops over groups, samples and tokens."""

import statistics
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learners.advantages import (
    Episodes,
    batch,
    group,
    marked,
    maxrl,
    reinforce_pp,
    rloo,
    turn,
    turns_of,
)
from tests.seeds import seeded

PAIRS_OF = st.lists(st.tuples(st.floats(-5, 5, width=16), st.integers(-3, 3)), min_size=1, max_size=40)


@given(PAIRS_OF, st.sampled_from([False, True, "population", "sample"]))
def test_group_and_rloo_equal_loops_over_groups(pairs, std):
    """`sample` divides as TRL and verl do; groups of one, or of equal rewards, get exactly 0."""
    rewards, groups = (np.array([pair[i] for pair in pairs]) for i in (0, 1))
    expected, others = np.zeros(len(pairs)), np.zeros(len(pairs))
    for place, (reward, name) in enumerate(pairs):
        own = [r for r, g in pairs if g == name]
        if len(set(own)) > 1:
            deviation = (statistics.stdev if std == "sample" else statistics.pstdev)(own)
            expected[place] = (reward - statistics.fmean(own)) / ((deviation + 1e-6) if std else 1.0)
            others[place] = reward - (sum(own) - reward) / (len(own) - 1)
        else:
            assert group(rewards, groups, std=std)[place] == 0.0
    np.testing.assert_allclose(group(rewards, groups, std=std), expected, atol=1e-9, rtol=1e-6)
    np.testing.assert_allclose(rloo(rewards, groups), others, atol=1e-9)


def test_a_reward_that_is_not_finite_is_not_hidden_and_no_samples_have_no_advantages():
    assert np.isnan(group(np.array([np.nan, 1.0]), np.zeros(2, int))).all()
    assert group(np.array([]), np.array([], int)).shape == (0,)


def test_maxrl_divides_by_the_groups_mean():
    advantages = maxrl(np.array([1.0, 0, 0, 0, 1, 1, 1, 0]), np.repeat([0, 1], 4), eps=0.0)
    np.testing.assert_allclose(advantages, [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1])
    with pytest.raises(ValueError, match="negative"):
        maxrl(np.array([-1.0]), np.array([0]))


@pytest.mark.parametrize("baseline", ["batch", "group"])
@pytest.mark.parametrize("std", [False, "population", "sample"])
def test_batch_divides_by_the_batchs_deviation(baseline, std):
    rewards, groups = seeded(2).random(24) + np.arange(24) // 6, np.arange(24) // 6
    centred = rewards - (rewards.mean() if baseline == "batch" else rewards.reshape(4, 6).mean(1)[groups])
    population, sample = statistics.pstdev(centred.tolist()), statistics.stdev(centred.tolist())
    spread = {False: 1.0, "population": population + 1e-6, "sample": sample + 1e-6}[std]
    np.testing.assert_allclose(batch(rewards, groups, baseline=baseline, std=std), centred / spread)
    apart = rloo(rewards, groups)
    normalised = (apart - apart.mean()) / statistics.stdev(apart.tolist())  # TRL's, of groups of one size
    np.testing.assert_allclose(batch(rewards, groups, baseline="group", std="sample", eps=0.0), normalised)


def episodes() -> Episodes:
    """Five samples of 1 to 5 trained tokens, one of them without any."""
    rng, sample = seeded(0), np.repeat([0, 1, 3, 4], [5, 1, 3, 4])
    return Episodes(rng.random(5), np.array([0, 0, 0, 1, 1]), sample, rng.normal(0, 0.1, len(sample)))


@pytest.mark.parametrize(("baseline", "gamma"), [(False, 1.0), (True, 1.0), (False, 0.9)])
@pytest.mark.parametrize("std", ["population", "sample"])
def test_reinforce_pp_normalises_returns_over_the_batchs_tokens(baseline, gamma, std):
    e, returns = episodes(), []
    rewards = group(e.rewards, e.groups) if baseline else e.rewards
    for i in (0, 1, 3, 4):
        own = -e.penalties[e.sample == i]
        own[-1] += rewards[i]
        returns += [sum(gamma**k * r for k, r in enumerate(own[t:])) for t in range(len(own))]
    deviation = (statistics.stdev if std == "sample" else statistics.pstdev)(returns)
    expected = (returns - np.mean(returns)) / (deviation + 1e-6)
    np.testing.assert_allclose(reinforce_pp(e, baseline=baseline, gamma=gamma, std=std), expected)
    assert marked(partial(reinforce_pp, gamma=0.5), "per_token")
    empty = Episodes(np.ones(2), np.zeros(2, int), np.zeros(0, int), np.zeros(0))
    assert reinforce_pp(empty).shape == (0,)


# Turns. Sample 0: turns at places 0-1 and 4-5, the second followed by a trained filler (place 6); sample 1:
# one turn; sample 2: no reward of a turn; sample 3: a turn whose tokens are not trained.
SAMPLE = np.array([0, 0, 0, 0, 0, 1, 1, 2, 3, 3])
PLACE = np.array([0, 1, 4, 5, 6, 0, 1, 0, 3, 4])
PAIRS = [[(1, 0.25), (5, 0.5)], [(1, 1.0)], [], [(1, 0.125), (4, 0.25)]]


def with_turns(rewards: list[float], groups: list[int]) -> Episodes:
    turns = turns_of(PAIRS, SAMPLE, PLACE)
    return Episodes(np.array(rewards), np.array(groups), SAMPLE, np.zeros(10), turns)


def test_each_turn_earns_at_its_last_trained_token_and_the_rest_at_the_end():
    turns = turns_of(PAIRS, SAMPLE, PLACE)
    assert turns.earned.tolist() == [0, 0.25, 0, 0.5, 0, 0, 1.0, 0, 0.125, 0.25]
    assert turns.number.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert turns_of([[], []], np.array([0, 1]), np.array([0, 0])) is None
    made = with_turns([1.0, 0.75, 0.5, 0.375], [0, 0, 0, 0])  # a penalty, say, has changed those of samples 0 and 1
    tokens = made.per_token(made.rewards)
    np.testing.assert_allclose(np.bincount(SAMPLE, tokens), made.rewards)
    np.testing.assert_allclose(tokens[:5], [0, 0.25, 0, 0.5, 0.25])


def test_credit_by_turns_against_a_loop():
    made = with_turns([0.75, 1.0, 0.5, 0.375], [7, 7, 7, 8])
    # Return from the first turn on: sample 0: 0.75; sample 1: 1; sample 2: 0.5; sample 3 is alone. Sample 0 alone has a
    # second turn.
    first = (0.75 + 1.0 + 0.5) / 3
    expected = [0.75 - first] * 5 + [1 - first] * 2 + [0.5 - first] + [0.0] * 2
    np.testing.assert_allclose(turn(made), expected, atol=1e-12)
    decisive = turns_of([[(0, 0.0), (1, 0.0), (2, 1.0)], [(0, 0.0)]], np.array([0, 0, 0, 1]), np.array([0, 1, 2, 0]))
    alone = Episodes(np.array([1.0, 0.0]), np.zeros(2, int), np.array([0, 0, 0, 1]), np.zeros(4), decisive)
    np.testing.assert_allclose(turn(alone), [0.5, 0.5, 0.5, -0.5])
    sample = np.array([0, 0, 1, 1])
    turns = turns_of([[(0, 0.0), (1, 1.0)], [(0, 0.0), (1, 0.0)]], sample, np.array([0, 1, 0, 1]))
    discounted = Episodes(np.array([1.0, 0.0]), np.zeros(2, int), sample, np.zeros(4), turns)
    np.testing.assert_allclose(turn(discounted, gamma=0.5), [0.25, 0.5, -0.25, -0.5], err_msg="per turn")


@given(PAIRS_OF)
def test_without_turns_it_is_group(pairs):
    rewards, groups = (np.array([pair[i] for pair in pairs]) for i in (0, 1))
    sample = np.repeat(np.arange(len(pairs)), 2)
    made = Episodes(rewards, groups, sample, np.zeros(len(sample)))
    np.testing.assert_allclose(turn(made), group(rewards, groups)[sample], atol=1e-12)
