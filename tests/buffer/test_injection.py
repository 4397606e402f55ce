"""Groups of a set age: random histories of actors, failures and crashes, through the controller."""

import random
from functools import partial

import pytest

from areal_like.config.registry import ConfigError
from buffer import policies
from buffer.groups import GroupManager
from buffer.injection import FixedAge, InjectionBroken
from buffer.schedulers import AsyncScheduler
from buffer.sizing import Fixed
from buffer.staleness import Bound
from tests.buffer.histories import ROUNDS, SIZE, Run, head_of
from tests.buffer.house import B, House, asynchronous

BATCHES, CHECKPOINT = 18, 4


class Aged(Run):
    """Every batch has the age that was set, or that of the first version."""

    def check_batch(self, body: dict) -> None:
        super().check_batch(body)
        entries = [self.store.entries[row[0]] for row in body["table"]["groups"]]
        assert {body["version"] - each.head.oldest for each in entries} == {min(self.staleness, body["version"])}


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("age", [0, 1, 3, 8])
def test_every_batch_has_its_age_whatever_happens(age: int, interval: int) -> None:
    events = {name: often for name, often in ROUNDS.items() if name not in ("late", "back")}
    for seed in range(4):
        rules = {"interval": interval, "age": FixedAge(Bound(age, B, interval), CHECKPOINT)}
        rules |= {"checkpoint_every": CHECKPOINT, "group_filter": policies.zero_variance}
        scheduler = partial(AsyncScheduler, Fixed(group_size=SIZE), max_staleness=age)
        run = Aged(random.Random(seed), scheduler, events, batches=BATCHES, **rules)
        for _ in range(300):
            run.step()
        run.go_on(until=BATCHES)


def rolled_out(age: int, odd: tuple[int, int] = (0, 0)) -> GroupManager:
    """All groups of version 0 are pushed; group 2 has these oldest and newest versions."""
    bound = Bound(age, B)
    groups = GroupManager(bound, policies.in_order, age=FixedAge(bound))
    while groups.room(0) > 0:
        entry = groups.admit(groups.store.counts.admitted, 0, 2, 2, "a", 0, 0.0)
        oldest, newest = odd if entry.id == 2 else (0, 0)
        groups.push(*head_of(entry.id, newest, 2, oldest=oldest), 0, 0.0)
    return groups


def test_training_is_one_version_ahead_of_the_actors_at_most() -> None:
    groups = rolled_out(age=0)
    assert groups.age and [groups.age.may_train(batch, *groups.held) for batch in range(3)] == [True, True, False]


@pytest.mark.parametrize("versions", [(0, 1), (1, 1)])
def test_a_group_of_another_age_is_never_served(versions: tuple[int, int]) -> None:
    with pytest.raises(InjectionBroken, match="group 2"):
        rolled_out(2, versions).serve(0)


def test_a_queue_that_does_not_fit_into_memory_is_an_error_and_not_a_wait() -> None:
    house = House(asynchronous(max_staleness=32), age=FixedAge(Bound(32, B)))
    house.server.dispatcher.max_bytes = -1
    with pytest.raises(ConfigError, match="128 groups"):
        house.start()
