"""The number of concurrent sequences follows the engine's reports about memory."""

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
