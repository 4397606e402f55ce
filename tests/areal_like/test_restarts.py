"""How often a dead actor is started again, and after what delay."""

from __future__ import annotations

from areal_like.launch.restarts import CommonFault, RestartLimits, Restarts


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_delays_double_and_then_the_actor_is_left_out() -> None:
    restarts = Restarts(RestartLimits(max_restarts=4, window=3600.0), Clock())
    assert [restarts.delay("a") for _ in range(5)] == [0.0, 1.0, 2.0, 4.0, None]
    assert restarts.delay("b") == 0.0, "each is counted by itself"


def test_deaths_that_are_long_ago_do_not_count() -> None:
    """An actor that fails once an hour, for two weeks."""
    clock = Clock()
    restarts = Restarts(RestartLimits(max_restarts=1, window=3000.0), clock)
    for _ in range(24 * 14):
        assert restarts.delay("a") == 0.0
        clock.now += 3600.0
    assert [restarts.delay("a") for _ in range(2)] == [0.0, None]


def test_a_common_fault_is_one_that_has_struck_each_actor() -> None:
    fault = CommonFault()
    assert not fault.strikes_all("a", "port 1 is in use, at 0x7f", ["a", "b"])
    assert not fault.strikes_all("a", "port 2 is in use, at 0x7f", ["a", "b"])
    assert not fault.strikes_all("b", "another error", ["a", "b"])
    assert fault.strikes_all("b", "port 3 is in use, at 0xab", ["a", "b"])


def test_one_death_proves_nothing_and_what_comes_from_outside_neither() -> None:
    fault = CommonFault()
    assert not fault.strikes_all("a", "no accelerator", ["a"])
    assert fault.strikes_all("a", "no accelerator", ["a"])
    fault = CommonFault()
    assert not fault.strikes_all("a", "", ["a", "b"])
    assert not fault.strikes_all("b", "", ["a", "b"])
