"""The adaptive time-out follows its formula."""

import pytest

from actors.reward_times import RewardTimes


def test_the_limit_is_the_slowest_right_answer_with_slack_between_both_bounds():
    times = RewardTimes(2, 30, 1.5)
    assert times.limit(1) == times.limit(None) == 30, "nothing is known"
    for score, seconds, limit in [(0.0, 9, 30), (1.0, 1, 2), (1.0, 4, 6), (1.0, 3, 6), (0.5, 15, 6), (1.0, 25, 30)]:
        times.add(1, score, seconds)
        assert times.limit(1) == limit
    assert times.limit(2) == 30, "another prompt"


def test_the_case_unused_for_longest_is_forgotten():
    times = RewardTimes(2, 30, 1.5, cases=2)
    times.add(1, 1.0, 4)
    times.add(2, 1.0, 4)
    times.limit(1)
    times.add(3, 1.0, 4)
    assert [times.limit(case) for case in (1, 2, 3)] == [6, 30, 6]


@pytest.mark.parametrize("knobs", [(0, 30, 1.5), (3, 2, 1.5), (2, 30, 0.9)])
def test_bounds_that_make_no_sense_are_refused(knobs):
    with pytest.raises(ValueError, match="want 0 < min_timeout"):
        RewardTimes(*knobs)
