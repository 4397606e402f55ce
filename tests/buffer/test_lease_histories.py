"""Leases, deadlines, refusals and batches that are set aside, played by dice through the real controller.

Actors make progress or hang, push (also late, also untrainable groups), fail, hand back, end and join again; the
learner trains, or has a batch set aside; time passes. After every step each lease that runs is known to its actor and
to its group, the ledger balances, and nobody is asked twice; at the end, once everybody works, the next batch comes.
"""

import random
import time

import pytest

from buffer.checks import RolloutsFail
from buffer.groups import GroupManager
from buffer.policies import fifo, in_order
from buffer.store import LEASED, Stage
from tests.buffer.house import SIGN_OF_LIFE, B, House, asynchronous
from tests.buffer.paper import Paper

TIMEOUT = 100.0
STEPS = 60


class History:
    """`hung`: actors without any progress; `leases`: the leases in each actor's own list."""

    def __init__(self, dice: random.Random, monkeypatch: pytest.MonkeyPatch):
        self.dice, self.ahead, real = dice, 0.0, time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + self.ahead)
        self.staleness, policy = dice.choice([0, 1, 3]), dice.choice([in_order, fifo])
        rules = {"batch_policy": policy, "staleness_policy": dice.choice(["drop", "requeue", "wait"])}
        evaluate = dice.choice([0, 3])
        self.rules = rules | {"actors": 3, "lease_timeout": TIMEOUT, "evaluate": evaluate}
        self.house = House(asynchronous(max_staleness=self.staleness), **self.rules)
        self.house.slots = dice.choice([8, 24, 256])
        self.server = self.house.server
        self.server.failures.most = 10**9
        self.journal = Paper()
        self.server.groups.record = self.journal.append
        self.peers = {name: name for name in self.house.names}
        self.held = dict.fromkeys(self.house.names, 0)
        self.leases: dict[str, dict[int, int]] = {name: {} for name in self.house.names}  # group → version of the lease
        self.late: list[tuple[str, int, int]] = []
        self.hung: set[str] = set()
        self.heldout: dict[str, set[int]] = {name: set() for name in self.house.names}
        self.seen = self.joined = self.trained = self.redo = 0
        self.served: list[int] | None = None
        self.house.start()
        self.want()

    # ---- everybody --------------------------------------------------------------------------------------------------

    def say(self, name: str, kind: str, body: dict, *payloads: bytes) -> None:
        self.house.say(self.peers.get(name, name), kind, body, *payloads)
        self.listen()

    def listen(self) -> None:
        names = {peer: name for name, peer in self.peers.items()}
        sent = self.house.router.sent
        while self.seen < len(sent):
            peer, kind, body = sent[self.seen]
            self.seen += 1
            name = names.get(peer, "")
            if kind == "lease" and name:
                for group_id, _, split, *_ in body["leases"]:
                    if split == "train":
                        assert group_id not in self.leases[name], "it has this one already"
                        self.leases[name][group_id] = self.held[name]
                    else:
                        self.heldout[name].add(group_id)
            elif kind == "cancel" and name and not body["hand_back"]:  # else it is handed back when the dice say so
                for group_id in body["ids"]:
                    if group_id in self.leases[name]:
                        self.late.append((name, group_id, self.leases[name].pop(group_id)))
            elif kind == "quit" and name:
                self.die(name)
            elif kind == "batch" and body["redo"] == self.redo:
                self.served = [row[0] for row in body["table"]["groups"]]
                oldest = min(body["table"]["digests"])
                assert body["version"] - oldest <= self.staleness

    # ---- the learner ------------------------------------------------------------------------------------------------

    def want(self) -> None:
        self.served = None
        self.say("learner", "want", {"index": self.trained, "version": self.trained})

    def train(self) -> None:
        if self.served is None:
            return
        self.say("learner", "trained", {"index": self.trained})
        self.trained += 1
        self.house.publish(self.trained)
        self.listen()
        self.want()

    def set_aside(self) -> None:
        if self.served is not None:
            faulty = set(self.served)
            self.redo += 1
            self.say("learner", "untrainable", {"index": self.trained, "reason": "by the dice"})
            assert not faulty & self.server.store.entries.keys()
            self.want()

    # ---- actors -----------------------------------------------------------------------------------------------------

    def update(self, name: str) -> None:
        self.held[name] = self.trained
        self.house.apply(self.trained, self.peers[name])
        self.listen()

    def some(self, name: str) -> int | None:
        return self.dice.choice(sorted(self.leases[name])) if self.leases[name] else None

    def push(self, name: str) -> None:
        if (group_id := self.some(name)) is not None:
            version = self.dice.choice([self.leases[name].pop(group_id), self.held[name]])
            self.house.push(self.peers[name], group_id, version)
            self.listen()

    def push_late(self) -> None:
        if self.late:
            name, group_id, version = self.late.pop(self.dice.randrange(len(self.late)))
            self.house.push(self.peers[name], group_id, version)
            if group_id not in {entry.id for entry in self.server.store.of(*LEASED)}:
                self.leases[name].pop(group_id, None)  # a lease that it was given again meanwhile
            self.listen()

    def push_rubbish(self, name: str) -> None:
        if (group_id := self.some(name)) is not None:
            del self.leases[name][group_id]
            self.house.push(self.peers[name], group_id, 10**6)
            self.listen()

    def fail(self, name: str) -> None:
        if (group_id := self.some(name)) is not None:
            del self.leases[name][group_id]
            self.say(name, "failed", {"id": group_id, "reason": "rejected", "detail": ""})

    def hand_back(self, name: str, leaving: bool) -> None:
        ids = [each for each in self.leases[name] if leaving or self.dice.random() < 0.5]
        for group_id in ids:
            self.late.append((name, group_id, self.leases[name].pop(group_id)))
        self.say(name, "hand_back", {"ids": ids, "partials": [], "leaving": leaving})
        if leaving:
            self.join(name)

    def die(self, name: str) -> None:
        if self.dice.random() < 0.5:
            self.say("supervisor", "lost", {"name": name, "pid": 0, "how": "died"})
        self.join(name)

    def join(self, name: str) -> None:
        self.joined += 1
        self.leases[name].clear()
        self.heldout[name].clear()
        self.late = [each for each in self.late if each[0] != name or self.dice.random() < 0.5]
        self.hung.discard(name)
        self.peers[name] = f"{name}:{self.joined}"
        self.say(name, "hello", {"role": "actor", "name": name, "pid": self.joined, "slots": self.house.slots})
        self.update(name)

    def evaluate(self, name: str) -> None:
        if self.heldout[name]:
            body = {"id": self.heldout[name].pop(), "reward": 1.0, "oldest": 0, "newest": 0, "length": 4}
            self.say(name, "evaluated", body)

    def time_passes(self, seconds: float) -> None:
        self.ahead += seconds
        for name in self.house.names:
            if name not in self.hung:
                moved = {"progress": dict.fromkeys(self.leases[name], 1)}
                moved |= {"heldout": dict.fromkeys(self.heldout[name], 1)}
                self.say(name, "heartbeat", SIGN_OF_LIFE | moved)
        self.house.server.step(0)
        self.listen()

    # ---- what must hold ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        replay, held_ids = self.server.groups, list[int]()
        for actor in self.server.fleet:
            held_by = replay.store.held_by(actor.name)
            assert held_by.keys() == self.leases[actor.name].keys(), "both know the same leases"
            held_ids += held_by
        assert sorted(held_ids) == sorted(entry.id for entry in replay.store.of(*LEASED)), "each has one holder"
        assert all(entry.actor in entry.holders for entry in replay.store.of(*LEASED))
        ledger = replay.store.ledger()
        gone = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
        assert ledger["admitted"] == gone + ledger["active"] and ledger["trained"] == B * self.trained
        held = [entry.slot for entry in replay.store.entries.values()]
        assert sorted(held + replay.store.slots.free) == list(range(replay.store.trained, replay.store.slots.end))

    def step(self) -> None:
        name = self.dice.choice(self.house.names)
        events = {
            "push": lambda: self.push(name),
            "train": self.train,
            "time": lambda: self.time_passes(self.dice.choice([5.0, 30.0, 60.0, 120.0])),
            "hang": lambda: self.hung.symmetric_difference_update({name}),
            "update": lambda: self.update(name),
            "late": self.push_late,
            "rubbish": lambda: self.push_rubbish(name),
            "fail": lambda: self.fail(name),
            "back": lambda: self.hand_back(name, self.dice.random() < 0.3),
            "die": lambda: self.die(name),
            "aside": self.set_aside,
            "evaluate": lambda: self.evaluate(name),
        }
        often = {"push": 20, "train": 6, "time": 10, "hang": 6, "update": 6, "rubbish": 2}
        events[self.dice.choices(list(events), [often.get(each, 3) for each in events])[0]]()

    def go_on(self) -> None:
        """Every actor works, and two more batches are trained."""
        self.hung.clear()
        for name in self.house.names:
            self.join(name)
        for _ in range(200):
            if self.served is not None:
                before = self.trained
                self.train()
                if before % 2:
                    return
            for name in self.house.names:
                self.update(name)
                for _ in range(len(self.leases[name])):
                    self.push(name)
                while self.heldout[name]:
                    self.evaluate(name)
            self.time_passes(1.0)
            self.check()
        pytest.fail(f"stuck: {self.server.store.ledger()}")

    def after_a_crash(self) -> None:
        """The journal has the same groups in the same stages, except that no group runs."""
        replay = self.server.groups
        self.journal.check(replay, replay.bound)
        house = House(asynchronous(max_staleness=self.staleness), **self.rules)
        again: GroupManager = house.server.groups
        self.journal.restore(again, self.trained)
        assert again.store.admitted == replay.store.admitted and again.store.trained == replay.store.trained
        assert again.store.filtered == replay.store.filtered and again.store.dropped == replay.store.dropped
        assert again.store.entries.keys() == replay.store.entries.keys()
        here = {Stage.WAITING, Stage.SERVED}
        assert {e.id for e in replay.store.entries.values() if e.stage in here} == {
            e.id for e in again.store.entries.values() if e.stage in here
        }
        if self.served:
            assert again.store.planned[self.trained] == self.served


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_whatever_happens_leases_are_known_and_batches_come(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    timeouts = aside = 0
    for number in range(first, first + 50):
        with monkeypatch.context() as patch:
            history = History(random.Random(number), patch)
            for _ in range(STEPS):
                try:
                    history.step()
                except RolloutsFail:
                    break
                history.check()
            else:
                history.after_a_crash()
                history.go_on()
            timeouts += history.server.gauges.lease_timeouts
            aside += history.redo
    assert min(timeouts, aside) > 10
