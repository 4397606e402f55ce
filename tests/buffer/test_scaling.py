"""The time of a turn, of a push and of a draw does not grow with all groups or all prompts: ratios, never seconds."""

import time
from collections.abc import Callable

import pytest

from areal_like.wire.groups import make_head
from buffer.groups import GroupManager
from buffer.policies import in_order
from buffer.staleness import Bound
from tests.buffer.house import House, asynchronous

FEW, MANY = 1_000, 10_000
MOST_GROWTH = 4.0
"""Of the time of one step, from FEW to MANY: caches grow cold, a scan takes 10 times as long."""


def seconds(made: Callable[[int], Callable[[], object]], count: int, steps: int = 50) -> float:
    """The least time of `steps` steps, of several tries, on a state of `count` groups or prompts."""
    step, found = made(count), []
    for _ in range(7):
        begin = time.process_time()
        for _ in range(steps):
            step()
        found.append(time.process_time() - begin)
    return min(found)


def pushing_and_serving_behind_a_straggler(count: int) -> Callable[[], object]:
    groups, ids = GroupManager(Bound(float("inf"), 4), in_order), iter(range(1, count))
    for group_id in range(count):
        groups.admit(group_id, group_id, 1, 1, "a", 0, 0.0)

    def step() -> None:
        groups.push(make_head(next(ids), [(1, 5, 0, 1, 1.0)], [(0, 5)], {0: "digest"}), b"x" * 5, 0, 0.0)
        assert groups.serve(0) == []

    return step


def turns_in_which_nothing_happens(count: int) -> Callable[[], object]:
    house = House(asynchronous(max_staleness=2), rows=count).start()
    for group_id in range(100, count):
        house.server.groups.admit(group_id, 0, 8, 8, "actor-0", 0, 0.0)
    return lambda: house.server.step(0)


def turns_with_queued_groups(count: int) -> Callable[[], object]:
    house = House(asynchronous(max_staleness=float("inf")), rows=count)
    house.slots = 8
    house.start()
    for group_id in range(100, 100 + count):
        house.server.groups.admit(group_id, 0, 8, 8, "actor-0", 0, 0.0)
        house.server.groups.requeue(group_id)
    return lambda: house.server.step(0)


def turns_while_an_actor_lags_behind_an_evaluation(count: int) -> Callable[[], object]:
    house = House(asynchronous(), evaluate=count)
    house.hello("actor-2")
    house.start()
    assert house.server.evaluation.has_rows
    return lambda: house.server.step(0)


@pytest.mark.parametrize(
    "made",
    [
        pushing_and_serving_behind_a_straggler,
        turns_in_which_nothing_happens,
        turns_with_queued_groups,
        turns_while_an_actor_lags_behind_an_evaluation,
    ],
    ids=lambda made: made.__name__,
)
def test_the_time_of_a_step_grows_little(made: Callable[[int], Callable[[], object]]) -> None:
    assert any(seconds(made, MANY) < MOST_GROWTH * max(seconds(made, FEW), 1e-5) for _ in range(3))
