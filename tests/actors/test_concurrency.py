"""The number of sequences that run at once, by what memory has said."""

import random

from actors.engines.concurrency import INTERVAL, Concurrency


def test_half_of_what_ran_at_once_and_one_more_after_each_stretch_of_peace() -> None:
    planner = Concurrency(16)
    planner.pressed(12)
    assert planner.limit == 6
    for _ in range(INTERVAL - 1):
        planner.step()
    assert planner.limit == 6
    planner.step()
    assert planner.limit == 7
    planner.pressed(7)
    for _ in range(INTERVAL - 1):
        planner.step()
    assert planner.limit == 3, "peace begins anew"
    planner.pressed(1)
    assert planner.limit == 1
    for _ in range(100 * INTERVAL):
        planner.step()
    assert planner.limit == 16


def test_it_settles_near_what_there_is_room_for() -> None:
    """Room for about 20 of 64: it saws between half of that and all of it."""
    planner, dice, seen = Concurrency(64), random.Random(0), []
    for _ in range(20_000):
        room = dice.choice((19, 20, 21))
        if planner.limit > room:
            planner.pressed(planner.limit)
        planner.step()
        seen.append(planner.limit)
    late = seen[5000:]
    assert 12 < sum(late) / len(late) < 19 and max(late) <= 21 and min(late) >= 9
