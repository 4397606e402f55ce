"""Tensor parallelism by what memory has said, as tables of (requests, preemptions) per step and the TP after it."""

import pytest

from actors.engines.parallelism import PEACE, Parallelism

QUIET = (100, 0)
HISTORIES = {
    "a rise of five points is none": [((100, 5), 1), ((100, 10), 1), ((100, 15), 1)],
    "one of six is": [((100, 6), 2)],
    "only what rises counts": [((100, 50), 2), ((100, 50), 2), ((100, 54), 2), ((100, 60), 4)],
    "against the step before, not the best one": [((100, 50), 2), ((100, 20), 2), ((100, 26), 4)],
    "shares, not numbers": [((10, 0), 1), ((1000, 50), 1), ((10, 1), 1), ((10, 2), 2)],
    "up to the most": [((100, 20), 2), ((100, 40), 4), ((100, 60), 8), ((100, 80), 8)],
    "four steps of peace": [((100, 20), 2), (QUIET, 2), (QUIET, 2), (QUIET, 2), (QUIET, 1)],
    "that follow one another": [((100, 20), 2), *[(QUIET, 2)] * 3, ((100, 1), 2), *[(QUIET, 2)] * 3, (QUIET, 1)],
    "down to the least": [*[(QUIET, 1)] * 9, ((100, 20), 2), *[(QUIET, 2)] * 3, *[(QUIET, 1)] * 9],
    "each halving has its own four": [((9, 9), 2), ((9, 18), 4), *[(QUIET, 4)] * 3, *[(QUIET, 2)] * 4, (QUIET, 1)],
    "a step without requests is none": [((100, 20), 2), *[(QUIET, 2), ((0, 0), 2)] * 3, (QUIET, 1)],
}


@pytest.mark.parametrize("name", HISTORIES)
def test_preemptions_double_it_and_peace_halves_it(name: str) -> None:
    planner = Parallelism(1, 8)
    assert [planner.step(*seen) for seen, _ in HISTORIES[name]] == [size for _, size in HISTORIES[name]]


def test_it_stays_within_its_bounds_whatever_comes() -> None:
    planner = Parallelism(2, 2)
    assert {planner.step(10, 10 * (step % 7 > PEACE)) for step in range(50)} == {2}
