"""Groups of a set age: random histories of actors, filters, failures and crashes, through the controller."""

import random

import pytest

from areal_like.config.registry import ConfigError
from areal_like.wire.groups import make_head
from buffer.groups import GroupManager
from buffer.injection import FixedAge, InjectionBroken
from buffer.policies import in_order
from buffer.staleness import Bound
from buffer.store import LEASED
from tests.buffer.house import House, asynchronous
from tests.buffer.paper import Paper

B, BATCHES, CHECKPOINT = 4, 18, 4


def head_of(group_id: int, *versions: int):
    row = (1, 2 * len(versions), 0, len(versions), 0.0)
    return make_head(group_id, [row], [(version, 2) for version in versions], dict.fromkeys(versions, "d"))


class Run:
    """Actors that each hold one version, a learner one batch ahead, a journal in memory."""

    def __init__(self, age: int, interval: int, seed: int):
        self.age, self.interval, self.chance = age, interval, random.Random(seed)
        self.journal = Paper()
        self.next_id = self.checkpoint = 0
        self.trained: list[list[int]] = []
        self.open()

    def open(self) -> None:
        self.bound = Bound(self.age, B, self.interval)
        self.replay = GroupManager(self.bound, in_order, age=FixedAge(self.bound, CHECKPOINT))
        self.journal.restore(self.replay, self.checkpoint)
        self.batches, self.trained = self.checkpoint, self.trained[: self.checkpoint]
        self.published = self.bound.batch_version(self.batches)
        self.held = {"a": self.published, "b": self.published}

    def admit(self, actor: str) -> None:
        version = self.held[actor]
        if entry := self.replay.queued_for(version):
            self.replay.assign(entry, actor, version)
        elif self.replay.room(version) > 0:
            self.replay.admit(self.next_id, 0, 1, 1, actor, version, 0.0)
            self.next_id += 1

    def push(self, actor: str, event: str = "push") -> None:
        running = [entry for entry in self.replay.store.of(*LEASED) if entry.actor == actor]
        if running and event == "drop":
            self.replay.drop(self.chance.choice(running).id, "failed")
        elif running and event == "requeue":
            self.replay.requeue(self.chance.choice(running).id)
        elif running:
            self.replay.push(head_of(self.chance.choice(running).id, self.held[actor]), b"x" * 18, 0, 0.0)

    def learn(self) -> None:
        if self.replay.may_announce(self.published):
            self.held = dict.fromkeys(self.held, self.published)
        if self.replay.may_train(self.batches) and (entries := self.replay.serve(self.batches)):
            version = self.bound.batch_version(self.batches)
            assert {version - entry.head.oldest for entry in entries} == {min(self.age, version)}
            self.replay.finish(self.batches)
            self.trained.append([entry.id for entry in entries])
            self.batches += 1
            self.published = self.bound.batch_version(self.batches)
            if self.batches % CHECKPOINT == 0 and self.batches % self.bound.interval == 0:
                self.checkpoint = self.batches
                if self.chance.random() < 0.5:
                    self.journal.rotate(self.replay)


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("age", [0, 1, 3, 8])
@pytest.mark.parametrize("seed", range(6))
def test_every_batch_has_its_age_whatever_happens(age: int, interval: int, seed: int) -> None:
    run, crashes = Run(age, interval, seed), 3
    for _ in range(60_000):
        event, actor = run.chance.random(), run.chance.choice("ab")
        if event < 0.3:
            run.admit(actor)
        elif event < 0.7:
            run.push(actor, run.chance.choices(["push", "drop", "requeue"], [8, 1, 1])[0])
        elif event < 0.998 or not crashes:
            run.learn()
        else:
            crashes -= 1
            run.open()
        if run.batches >= BATCHES:
            break
    assert run.batches >= BATCHES, "stuck"
    trained = [group_id for batch in run.trained for group_id in batch]
    assert len(set(trained)) == len(trained) == BATCHES * B
    ledger = run.replay.store.ledger()
    assert ledger["admitted"] == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["active"]


def test_the_buffer_announces_no_version_before_the_slots_of_the_one_before_are_rolled_out() -> None:
    """Of age 1: batches 0 and 1 need version 0, every later one the version before its own."""
    house = House(asynchronous(max_staleness=1), age=FixedAge(Bound(1, B)))
    Paper().restore(house.server.groups, 0)
    house.start()
    assert len(house.leases()) == 2 * B
    house.want(0)
    for group_id in range(2 * B - 1):
        house.finish(group_id, 0)
    assert house.batches() == [[0, 1, 2, 3]]
    house.say("learner", "trained", {"index": 0})
    house.publish(1)
    assert house.server.weights.version == 0 and len(house.leases()) == 2 * B, "group 7 still runs"
    house.finish(2 * B - 1, 0)
    assert house.server.weights.version == 1
    house.apply(1)
    assert len(house.leases()) == 3 * B
    house.want(1)
    assert house.batches() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_training_is_one_version_ahead_of_the_actors_at_most() -> None:
    run = Run(0, interval=1, seed=0)
    while run.replay.room(0) > 0:
        run.admit("a")
        run.push("a")
    assert [run.replay.may_train(batch) for batch in range(3)] == [True, True, False]


@pytest.mark.parametrize("versions", [(0, 1), (1,)])
def test_a_group_of_another_age_is_never_served(versions: tuple[int, ...]) -> None:
    run = Run(2, 1, 0)
    while run.replay.room(0) > 0:
        run.admit("a")
    for group_id in range(B):
        run.replay.push(head_of(group_id, *(versions if group_id == 2 else (0,))), b"", 0, 0.0)
    with pytest.raises(InjectionBroken, match="group 2"):
        run.replay.serve(0)


def test_a_queue_that_does_not_fit_into_memory_is_an_error_and_not_a_wait() -> None:
    house = House(asynchronous(max_staleness=32), age=FixedAge(Bound(32, B)))
    house.server.dispatcher.max_bytes = -1
    with pytest.raises(ConfigError, match="128 groups"):
        house.start()
