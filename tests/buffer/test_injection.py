"""Groups of a set age: random histories of actors, filters, failures and crashes, through the controller."""

import random
from collections import Counter

import numpy as np
import pytest

from areal_like.config.registry import ConfigError
from areal_like.wire.groups import make_head
from buffer.groups import GroupManager
from buffer.injection import AgedSlots, Ages, InjectionBroken
from buffer.policies import in_order
from buffer.staleness import Bound
from buffer.store import LEASED
from tests.buffer.house import House, asynchronous
from tests.buffer.paper import Paper

B, BATCHES, CHECKPOINT = 4, 18, 4
SPECS = [0, 1, 3, 8, {0: 0.5, 4: 0.5}, {2: 0.75, 5: 0.25}, {"uniform": [0, 6]}]


def head_of(group_id: int, *versions: int):
    runs = [(version, 2) for version in versions]
    row = (1, 2 * len(versions), 0, len(versions), 0.0)
    return make_head(group_id, [row], runs, {version: "d" for version in versions})


class Run:
    """Actors that each hold one version, a learner one batch ahead, a journal in memory."""

    def __init__(self, spec, interval: int, seed: int):
        self.ages, self.bound, self.chance = Ages(spec, seed=5), None, random.Random(seed)
        self.bound = Bound(self.ages.oldest, B, interval)
        self.journal = Paper()
        self.held = {"a": 0, "b": 0}
        self.published = self.batches = self.next_id = self.checkpoint = 0
        self.trained: list[list[int]] = []
        self.open()

    def open(self) -> None:
        self.replay = GroupManager(self.bound, in_order, slots=AgedSlots(self.ages, self.bound, CHECKPOINT))
        self.journal.restore(self.replay, self.checkpoint)
        self.batches, self.trained = self.checkpoint, self.trained[: self.checkpoint]
        self.published = self.bound.batch_version(self.batches)
        self.held = dict.fromkeys(self.held, self.published)

    def admit(self, actor: str) -> None:
        version = self.held[actor]
        entry = self.replay.queued_for(version)
        if entry:
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
        if not self.replay.may_train(self.batches):
            return
        entries = self.replay.serve(self.batches)
        if entries:
            self.check(entries)
            self.replay.finish(self.batches)
            self.trained.append([entry.id for entry in entries])
            self.batches += 1
            self.published = self.bound.batch_version(self.batches)
            if self.batches % CHECKPOINT == 0 and self.batches % self.bound.interval == 0:
                self.checkpoint = self.batches
                if self.chance.random() < 0.5:
                    self.journal.rotate(self.replay)

    def check(self, entries) -> None:
        version = self.bound.batch_version(self.batches)
        found = Counter(version - entry.head.oldest for entry in entries)
        assert found == Counter(min(int(age), version) for age in self.ages.of_batch(self.batches, B))


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_every_batch_has_its_ages_whatever_happens(spec, interval: int, seed: int) -> None:
    run = Run(spec, interval, seed)
    crashes = 3
    for _ in range(60_000):
        event = run.chance.random()
        actor = run.chance.choice("ab")
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
    most = (run.ages.oldest + 2) * interval * B
    assert len(run.replay.store.slots.state()[5]) <= most, "a snapshot does not grow with the run"
    ledger = run.replay.store.ledger()
    assert ledger["admitted"] == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["active"]


def test_training_is_one_version_ahead_of_the_actors_at_most() -> None:
    """Batches are served ahead, and their groups may be rolled out long before; the learner waits all the same."""
    run = Run(0, interval=1, seed=0)
    slots = run.replay.store.slots
    while run.replay.room(0) > 0:
        run.admit("a")
        run.push("a")
    assert not slots.free and [run.replay.may_train(batch) for batch in range(3)] == [True, True, False]


def test_the_buffer_announces_no_version_before_the_slots_of_the_one_before_are_rolled_out() -> None:
    """Of age 1: batches 0 and 1 need version 0, every later one the version before its own."""
    house = House(asynchronous(max_staleness=1), slots=AgedSlots(Ages(1), Bound(1, B)))
    Paper().restore(house.server.groups, 0)
    house.start()
    assert len(house.leases()) == 2 * B
    house.say("learner", "want", {"index": 0, "version": 0})
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
    house.say("learner", "want", {"index": 1, "version": 1})
    assert house.batches() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_group_of_another_age_is_never_served() -> None:
    for versions in [(0, 1), (1,)]:
        run = Run(2, 1, 0)
        while run.replay.room(0) > 0:
            run.admit("a")
        for group_id in range(B):
            run.replay.push(head_of(group_id, *(versions if group_id == 2 else (0,))), b"", 0, 0.0)
        with pytest.raises(InjectionBroken, match="group 2"):
            run.replay.serve(0)


def test_shares_are_kept_in_every_batch_and_exactly_in_the_long_run() -> None:
    ages = Ages({0: 0.3, 4: 0.7}, seed=1)
    counts = [int((ages.of_batch(batch, 16) == 0).sum()) for batch in range(2000)]
    assert set(counts) == {4, 5} and np.mean(counts) == pytest.approx(16 * 0.3, abs=0.03)
    assert counts[:50] == [int((Ages({0: 0.3, 4: 0.7}, seed=1).of_batch(b, 16) == 0).sum()) for b in range(50)]
    assert counts != [int((Ages({0: 0.3, 4: 0.7}, seed=2).of_batch(batch, 16) == 0).sum()) for batch in range(2000)]


def test_a_queue_that_does_not_fit_into_memory_is_an_error_and_not_a_wait() -> None:
    with pytest.raises(ConfigError, match="128 groups"):
        AgedSlots(Ages(32), Bound(32, B)).check_memory(1000)
