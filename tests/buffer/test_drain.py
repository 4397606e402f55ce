"""A run that drains: every admitted group is trained, then the run ends."""

import time
from contextlib import nullcontext

import pytest

from areal_like.run.process import EXIT_STOPPED
from buffer.entries import LEASED
from tests.buffer.house import B, House, asynchronous


def drain(house: House) -> None:
    house.say("someone", "stop", {"drain": True})


def stops(house: House) -> list[dict]:
    return [body for who, kind, body in house.router.sent if kind == "stop" and who == "learner"]


def push_all(house: House, version: int) -> int:
    """Push every running group. Returns how many."""
    running = [(entry.actor, entry.id) for entry in house.store.entries.of(*LEASED)]
    for name, group_id in running:
        house.push(name, group_id, version)
    return len(running)


def started(scheduler, **rules) -> House:
    house = House(scheduler, **rules).start()
    house.want(0)
    return house


def train(house: House, index: int) -> None:
    house.want(index + 1)
    house.trained(index)


def test_without_draining_it_stops_before_the_next_version_and_not_within_one() -> None:
    """Two train steps make a version here."""
    house = started(asynchronous(max_staleness=1), interval=2)
    push_all(house, 0)
    house.say("someone", "stop", {"drain": False})
    house.say("learner", "want", {"index": 1, "version": 0})
    assert len(house.batches()) == 2 and len(stops(house)) == 1, "the second batch of a version comes"
    house.say("learner", "trained", {"index": 1})
    house.say("learner", "want", {"index": 2, "version": 1})
    assert len(house.batches()) == 2 and stops(house) == 2 * [{"drain": False}]


@pytest.mark.parametrize(("seconds", "ready", "ends"), [(9.0, False, False), (11.0, False, True), (11.0, True, False)])
def test_a_learner_that_waits_beyond_its_time_ends_unless_a_batch_is_complete(seconds, ready, ends) -> None:
    house = House(asynchronous(max_staleness=1)).start()
    if ready:
        push_all(house, 0)
    house.server.peers.clock = lambda: house.server.phase.started_at + seconds
    house.say("learner", "want", {"index": 0, "version": 0, "until": 10.0})
    house.server.step(0)
    assert stops(house) == ends * [{"drain": True, "late": True}] and len(house.batches()) == ready


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_run_whose_learner_does_not_confirm_the_stop_ends_without_it(confirmed: bool) -> None:
    house = started(asynchronous(max_staleness=1))
    for _ in range(2):
        house.say("someone", "stop", {"drain": False})
        if confirmed:
            house.say("learner", "stop", {"drain": False})
    house.server.peers.clock = lambda: time.monotonic() + 10.0
    with nullcontext() if confirmed else pytest.raises(SystemExit, match=str(EXIT_STOPPED)):
        house.server.step(0)


@pytest.mark.parametrize(("inflight", "batches"), [(4, 1), (6, 2)])
def test_the_last_batch_is_made_whole_and_a_failed_group_is_replaced(inflight: int, batches: int) -> None:
    house = started(asynchronous(max_staleness=1, max_inflight_groups=inflight))
    assert len(house.leases()) == inflight
    drain(house)
    failed = house.store.entries.of(*LEASED)[0]
    house.say(failed.actor, "failed", {"id": failed.id, "reason": "rejected", "detail": ""})
    while push_all(house, 0):
        pass
    for index in range(batches):
        assert not stops(house)
        train(house, index)
    assert stops(house) == [{"drain": True}]
    assert house.store.ledger()["trained"] == batches * B == len(house.leases()) - 1
