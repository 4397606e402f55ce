"""Random histories (`tests.buffer.histories`) under every policy: after any of them each batch keeps the bound, no
group is lost or trained twice, and the run goes on. The environment's HISTORIES sets how many are played in all."""

import contextlib
import os
import random
from functools import partial

import pytest

from areal_like.config.registry import ConfigError
from buffer import policies
from buffer.checks import RolloutsFail
from buffer.groups import GroupManager
from buffer.injection import FixedAge, InjectionBroken
from buffer.schedulers import AsyncScheduler
from buffer.sizing import Fixed
from buffer.staleness import Bound
from tests.buffer.histories import ROUNDS, SIZE, SIZINGS, Run, head_of, in_rounds, overlapping
from tests.buffer.house import B, House, asynchronous

HISTORIES = int(os.environ.get("HISTORIES", "480"))


@pytest.mark.parametrize("part", range(4))
def test_batches_come_and_leases_are_known_whatever_happens(part: int) -> None:
    for number in range(part, HISTORIES // 2, 4):
        run = overlapping(random.Random(number))
        with contextlib.suppress(RolloutsFail):
            for _ in range(60):
                run.step()
            run.crash()
            run.go_on(until=len(run.trained) + 2)


@pytest.mark.parametrize("sizing", SIZINGS)
def test_every_prompt_of_a_run_in_rounds_is_trained_once(sizing: str) -> None:
    for number in range(HISTORIES // 60):
        dice = random.Random(number)
        run = in_rounds(dice, sizing, batches=8)
        for _ in range(dice.randint(0, 120)):
            run.step()
        run.go_on(until=8)
        ledger = run.store.ledger()
        assert not set(ledger["dropped"]) - {"rejected"} and ledger["active"] == 0, ledger
        assert ledger["trained"] == 8 * B or sizing != "fixed"


@pytest.mark.parametrize("sizing", SIZINGS)
def test_a_drained_run_leaves_nothing(sizing: str) -> None:
    for number in range(HISTORIES // 120):
        dice = random.Random(number)
        run = in_rounds(dice, sizing, batches=1000)
        for _ in range(dice.randint(0, 120)):
            run.step()
        run.say("someone", "stop", {"drain": True})
        run.go_on(run.is_drained)
        ledger = run.store.ledger()
        assert ledger["active"] == 0 and not set(ledger["dropped"]) - {"rejected"}, (number, ledger)


@pytest.mark.parametrize("sizing", ["fixed", "restless"])
def test_an_epoch_has_each_prompt_once_though_some_wait_until_the_next_one_has_begun(sizing: str) -> None:
    overtaken = 0
    for number in range(6):
        run = in_rounds(random.Random(number), sizing, batches=8, zero_variance=False, rows=7)
        for turn in range(80):
            run.step(calm=True)
            if turn == 40:
                run.crash()  # with prompts of the epoch before in the queue
        run.go_on(until=8)
        ids = [group_id for batch in run.trained for group_id in batch]
        assert sorted(ids) == list(range(len(ids)))
        for epoch in range(len(ids) // 7):
            assert sorted(run.row_of[7 * epoch + place] for place in range(7)) == list(range(7))
        overtaken += ids != sorted(ids, key=lambda group_id: group_id // 7)
    assert overtaken >= 2


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
    for seed in range(3):
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
