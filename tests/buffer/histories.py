"""Random histories through the real controller: actors, a learner and a journal, played by dice.

Actors make progress or hang, push (also late, also groups that nobody can train on), fail, hand back, leave, die and
join again. The learner trains, checkpoints, or has a batch set aside. Time passes. Everything crashes and is made anew
from the journal. `Run.check` is what must hold after every step.
"""

import math
import random
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import pytest

from areal_like.types import Group, Sample
from areal_like.wire.groups import encode_group
from buffer import policies
from buffer.entries import LEASED, NO_SLOT, UNFINISHED, Stage
from buffer.policies import Waiting
from buffer.rounds import SyncScheduler
from buffer.schedulers import AsyncScheduler, Scheduler
from buffer.sizing import Fixed, GroupLengths, Sagc, Sizing
from tests.buffer.house import SIGN_OF_LIFE, B, House, answer, table
from tests.buffer.paper import Paper

SIZE, TIMEOUT = 4, 100.0
CALM = {"push": 6, "update": 2, "back": 1, "train": 2, "end": 1}
ROUNDS = CALM | {"die": 1, "fail": 1, "crash": 1, "late": 1}
"""Events of a run in rounds, and how often each happens."""
ALL = ROUNDS | {"push": 20, "train": 6, "time": 10, "hang": 6, "update": 6, "rubbish": 2, "leave": 1, "lie": 1}
ALL |= {"aside": 3, "evaluate": 3, "late": 3, "fail": 3, "back": 2}
OF_A_GROUP = ("push", "end", "fail", "lie", "rubbish")
RARE = {"die": 0.3, "fail": 0.3, "crash": 0.2, "lie": 0.2}


class Restless(Sizing):
    """A user's own controller: each batch has another group size."""

    sizes = (2, 4, 8)

    def __init__(self) -> None:
        super().__init__(group_size=SIZE)
        self.batches = 0

    def next_size(self, seen: Sequence[GroupLengths]) -> int:
        self.batches += 1
        return random.Random(self.batches).choice(self.sizes)

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


SIZINGS = {
    "fixed": lambda: Fixed(group_size=SIZE),
    "sagc": lambda: Sagc(group_size=SIZE, candidates=[4, 8, 16], budget=0.2),
    "restless": Restless,
}


def head_of(group_id: int, version: int, samples: int, dull: bool = False, oldest: int | None = None):
    def sample(index: int) -> Sample:
        runs = [(version if oldest is None or index else oldest, 1), (version, 1 + index * (group_id % 5))]
        length = sum(n for _, n in runs)
        reward = 1.0 if dull else float(index)
        zeros, ones = np.zeros(length, np.float32), np.ones(length, bool)
        return Sample(np.zeros(1 + length, np.int32), 1, zeros, ones, runs, reward, "stop")

    made = [sample(index) for index in range(samples)]
    return encode_group(Group(group_id, made, {v: f"d{v}" for s in made for v, _ in s.runs}))


class Run:
    """`scheduler`: makes one; `events`: how often each happens; `rules`: of the house. `leased`: the leases in each
    actor's own list, (launch, need, version at the lease) by group. `hung`: actors without any progress."""

    def __init__(
        self,
        dice: random.Random,
        scheduler: Callable[[], Scheduler],
        events: dict[str, int],
        *,
        batches: int = 1000,
        slots: int = 1000,
        checkpoint_every: int = 1,
        **rules: Any,
    ):
        self.dice, self.new_scheduler, self.events = dice, scheduler, events
        self.batches, self.slots, self.rules, self.checkpoint_every = batches, slots, rules, checkpoint_every
        self.interval, self.staleness = rules.get("interval", 1), scheduler().max_staleness
        self.journal, self.now = Paper(), 0.0
        self.checkpoint = self.joined = self.timeouts = self.aside = 0
        self.honest = True  # no group has tokens older than its lease
        self.trained: list[list[int]] = []
        self.orders: dict[int, list[int]] = {}
        self.row_of: dict[int, int] = {}
        self.begin()

    def begin(self) -> None:
        """Start, for the first time or after a crash of everything."""
        scheduler = self.new_scheduler()
        self.house = House(scheduler, actors=3, last_batch=self.batches, **self.rules)
        self.server, self.store, self.names = self.house.server, self.house.store, self.house.names
        self.bound = self.server.groups.bound
        self.server.peers.clock = lambda: self.now
        self.server.failures.most = 10**9
        self.journal.restore(self.server.groups, self.checkpoint)
        self.server.learner.steps, self.server.dispatcher.prompts.position = self.checkpoint, self.store.counts.admitted
        if self.store.scheduler:
            scheduler.load_state_dict(self.store.scheduler)
        del self.trained[self.checkpoint :]
        self.served: list[list[int]] = self.trained.copy()
        self.peers = {name: name for name in self.names}
        self.held = dict.fromkeys(self.names, -1)
        self.leased: dict[str, dict[int, tuple[int, int, int]]] = {name: {} for name in self.names}
        self.running: dict[str, dict[int, int]] = {name: {} for name in self.names}  # sequences, by group
        self.heldout: dict[str, set[int]] = {name: set() for name in self.names}
        self.ended = dict.fromkeys(self.names, 0)
        self.late: list[tuple[str, int, int, int]] = []
        self.hung: set[str] = set()
        self.seen = 0
        self.house.hello("learner", *self.names, slots=self.slots)
        self.publish()
        for name in self.names:
            self.update(name)
        self.want()

    def say(self, name: str, kind: str, body: dict, *payloads: bytes) -> None:
        self.house.say(self.peers.get(name, name), kind, body, *payloads)
        self.listen()

    def listen(self) -> None:
        """Handle the buffer's messages; a request to hand back is answered some time later."""
        sent, must_quit = self.house.router.sent, list[str]()
        while self.seen < len(sent):
            peer, kind, body = sent[self.seen]
            self.seen += 1
            name = next((name for name, known in self.peers.items() if known == peer), None)
            if kind == "batch":
                self.check_batch(body)
            elif name and kind == "lease":
                self.take_leases(name, body)
            elif name and kind == "cancel" and not body["hand_back"]:
                for group_id in self.leased[name].keys() & set(body["ids"]):
                    self.let_go_late(name, group_id)
            elif name and kind == "quit":
                must_quit.append(name)
            assert kind != "refused" or "rubbish" in self.events, body
        for name in must_quit:
            self.die(name)

    def take_leases(self, name: str, body: dict) -> None:
        for group_id, row, split, launch, need, *_ in body["leases"]:
            if split != "train":
                self.heldout[name].add(group_id)
                continue
            assert group_id not in self.leased[name], "it has this one already"
            assert self.row_of.setdefault(group_id, row) == row
            self.leased[name][group_id] = (launch, need, self.held[name])
            self.running[name][group_id] = launch

    def check_batch(self, body: dict) -> None:
        groups, version, first = body["table"]["groups"], body["version"], self.bound.batches.first(body["index"])
        ids, sizes = [group[0] for group in groups], [group[1] for group in groups]
        assert sum(sizes) == B * SIZE and len(set(sizes)) == 1, "the effective batch is kept"
        assert body["index"] == len(self.served)
        for place, group_id in enumerate(ids):
            entry = self.store.entries[group_id]
            oldest = min(made for made in entry.head.versions if made >= body["oldest_allowed"])
            assert version - oldest <= self.staleness, "the bound"
            assert self.staleness or oldest == entry.newest == version, "strictly on-policy"
            assert entry.stage is not Stage.SERVED or entry.slot == first + place
        assert self.orders.setdefault(len(self.served), ids) == ids, "after a crash the same groups in the same order"
        self.served.append(ids)

    # ---- the learner ------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return len(self.trained) // self.interval

    def publish(self) -> None:
        self.house.publish(self.version)
        for version in range(self.version):  # those of before a crash
            self.server.weights.digests[version] = f"d{version}"

    def want(self) -> None:
        index = len(self.served)
        if index < self.batches:
            self.say("learner", "want", {"index": index, "version": index // self.interval})

    def train(self) -> None:
        if len(self.served) == len(self.trained):
            return
        index = len(self.trained)
        if len(self.served) == index + 1:
            self.want()  # of the next, before this one is trained
        self.trained.append(self.served[index])
        self.say("learner", "trained", {"index": index})
        if (index + 1) % self.interval == 0:
            self.publish()
            if (index + 1) % self.checkpoint_every == 0 and self.dice.random() < 0.5:
                self.checkpoint = index + 1
                self.say("learner", "checkpointed", {"step": index + 1})
                if self.dice.random() < 0.5:
                    self.journal.rotate(self.server.groups)
        self.listen()

    def set_aside(self) -> None:
        if len(self.served) > len(self.trained):
            index, faulty = len(self.trained), set(self.served[len(self.trained)])
            self.say("learner", "untrainable", {"index": index, "reason": "by the dice"})
            assert not faulty & self.store.entries.keys()
            self.aside += 1
            del self.served[index:]
            self.orders = {batch: ids for batch, ids in self.orders.items() if batch < index}
            self.want()

    # ---- actors -----------------------------------------------------------------------------------------------------

    def update(self, name: str) -> None:
        self.held[name] = self.server.weights.version
        self.house.apply(self.held[name], self.peers[name])
        self.listen()

    def push(self, name: str, group_id: int, dull: bool = False) -> None:
        _, need, version = self.let_go(name, group_id)
        head, payload = head_of(group_id, self.held[name], need, dull, version)
        self.say(name, "push", table(head), payload)

    def let_go(self, name: str, group_id: int) -> tuple[int, int, int]:
        """Remove a group whose sequences have all ended."""
        leased, sequences = self.leased[name].pop(group_id), self.running[name].pop(group_id)
        self.end(name, sequences)
        return leased

    def let_go_late(self, name: str, group_id: int) -> int:
        """Remove a group that the actor may push all the same, later. Returns the samples that it has started."""
        launch, need, version = self.leased[name].pop(group_id)
        self.ended[name] += self.running[name].pop(group_id)
        self.late.append((name, group_id, need, version))
        return launch

    def end(self, name: str, sequences: int) -> None:
        self.ended[name] += sequences
        self.say(name, "credit", {"ended": self.ended[name]})

    def end_some(self, name: str, group_id: int) -> None:
        """End some sequences of a group that continues; at least one continues."""
        ended = self.dice.randint(0, self.running[name][group_id] - 1)
        self.running[name][group_id] -= ended
        self.end(name, ended)

    def recalled(self, name: str) -> list[int]:
        return [each for each, entry in self.store.entries.held_by(name).items() if entry.stage is Stage.RECALLED]

    def hand_back(self, name: str, ids: list[int], leaving: bool = False) -> None:
        lengths = {group_id: [(3, True)] * self.let_go_late(name, group_id) for group_id in ids}
        self.say(name, "hand_back", {"lengths": lengths, "leaving": leaving})

    def leave(self, name: str) -> None:
        self.hand_back(name, list(self.leased[name]), leaving=True)
        self.join(name)

    def push_late(self) -> None:
        name, group_id, need, version = self.late.pop(self.dice.randrange(len(self.late)))
        self.honest = False
        head, payload = head_of(group_id, version, need)
        self.say(name, "push", table(head), payload)
        if group_id in self.leased[name] and group_id not in self.store.entries.held_by(name):
            self.let_go(name, group_id)  # it had been leased to this actor again

    def lie(self, name: str, group_id: int) -> None:
        """Push tokens that are older than the lease allows: only the check at serving can find them."""
        self.honest = False
        head, payload = head_of(group_id, 0, self.let_go(name, group_id)[1])
        self.say(name, "push", table(head), payload)

    def push_rubbish(self, name: str, group_id: int) -> None:
        self.let_go(name, group_id)
        self.house.push(self.peers[name], group_id, 10**6)
        self.listen()

    def fail(self, name: str, group_id: int) -> None:
        self.let_go(name, group_id)
        self.say(name, "failed", {"id": group_id, "reason": "rejected", "detail": ""})

    def die(self, name: str) -> None:
        if self.dice.random() < 0.5:
            self.say("supervisor", "lost", {"name": name, "pid": 0, "how": "died", "for_good": False})
        self.join(name)

    def join(self, name: str) -> None:
        self.joined += 1
        self.leased[name].clear()
        self.running[name].clear()
        self.heldout[name].clear()
        self.hung.discard(name)
        self.ended[name] = 0
        if self.dice.random() < 0.5:  # a new process, or an old one that lost its connection
            self.peers[name] = f"{name}:{self.joined}"
        self.say(name, "hello", {"role": "actor", "name": name, "pid": self.joined, "slots": self.slots})
        self.update(name)

    def evaluate(self, name: str) -> None:
        self.say(name, "evaluated", *answer(self.heldout[name].pop(), 1.0))

    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for name in self.names:
            if name not in self.hung:
                moved = {"progress": dict.fromkeys(self.leased[name], 1)}
                moved |= {"heldout": dict.fromkeys(self.heldout[name], 1)}
                self.say(name, "heartbeat", SIGN_OF_LIFE | moved)
        self.server.step(0)
        self.listen()
        self.timeouts = max(self.timeouts, self.server.gauges.lease_timeouts)

    # ---- everything -------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        self.journal.check(self.server.groups, self.server.groups.bound)
        before = self.store.ledger()
        self.begin()
        assert self.store.counts.admitted >= before["admitted"] and self.store.ledger()["dropped"] == before["dropped"]
        assert self.store.ledger()["filtered"] == before["filtered"]

    def step(self, calm: bool = False) -> None:
        dice, name = self.dice, self.dice.choice(self.names)
        events = CALM | ({"evaluate": 1} if "evaluate" in self.events else {}) if calm else self.events
        event = dice.choices(list(events), list(events.values()))[0]
        if dice.random() < RARE.get(event, 1.0):
            running = dice.choice(list(self.leased[name])) if self.leased[name] else None
            self.make(event, name, running, dull=not calm and dice.random() < 0.15)
        self.check()

    def make(self, event: str, name: str, running: int | None, dull: bool) -> None:
        possible = {"late": self.late, "evaluate": self.heldout[name]}
        if not possible.get(event, True) or (event in OF_A_GROUP and running is None):
            return
        actions = {
            "push": lambda: self.push(name, running, dull),
            "end": lambda: self.end_some(name, running),
            "fail": lambda: self.fail(name, running),
            "lie": lambda: self.lie(name, running),
            "rubbish": lambda: self.push_rubbish(name, running),
            "update": lambda: self.update(name),
            "back": lambda: self.hand_back(name, self.recalled(name)),
            "leave": lambda: self.leave(name),
            "train": self.train,
            "aside": self.set_aside,
            "late": self.push_late,
            "evaluate": lambda: self.evaluate(name),
            "hang": lambda: self.hung.symmetric_difference_update({name}),
            "time": lambda: self.time_passes(self.dice.choice([5.0, 30.0, 60.0, 120.0])),
            "die": lambda: self.die(name),
            "crash": self.crash,
        }
        actions[event]()

    def check(self) -> None:
        store, ledger = self.store, self.store.ledger()
        gone = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
        assert ledger["admitted"] == gone + ledger["active"]
        slots = [entry.slot for entry in store.entries.values() if entry.slot != NO_SLOT]
        assert sorted(slots + store.slots.free) == list(range(store.counts.trained, store.slots.end))
        for entry in store.entries.values():
            assert (entry.slot == NO_SLOT) == (entry.stage is Stage.DEFERRED or entry.id in store.entries.redundant)
            if entry.stage is not Stage.RECALLED:  # it may have one
                assert (entry.slot == NO_SLOT) == (entry.stage in (Stage.REDUNDANT, Stage.DEFERRED))
        assert store.bytes == sum(len(e.payload) for e in store.entries.values())
        queued, lowest = store.entries.first_queued, store.entries.lowest_open(store.slots.free)
        assert (queued and queued.slot) == min((e.slot for e in store.entries.of(Stage.QUEUED)), default=None)
        unfinished = [e.slot for e in store.entries.of(*UNFINISHED) if e.slot != NO_SLOT]
        assert (lowest and lowest[0]) == min([*store.slots.free, *unfinished], default=None)
        waits = self.rules.get("staleness_policy") == "wait" or self.server.groups.chooser._waits_for_gaps
        assert not (self.honest and waits and store.ledger()["dropped"].get("stale"))
        leased = {name: store.entries.held_by(name).keys() for name in self.names}
        assert leased == {name: self.leased[name].keys() for name in self.names}, "both know the same leases"
        assert sum(map(len, leased.values())) == store.entries.count(*LEASED), "each has one holder"
        ids = [each for batch in self.served for each in batch]
        assert len(ids) == len(set(ids)), "a prompt was trained twice"

    def is_drained(self) -> bool:
        stops = ("learner", "stop", {"drain": True}) in self.house.router.sent
        return stops and len(self.trained) == len(self.served)

    def go_on(self, until: int | Callable[[], bool]) -> None:
        """All actors work, until so many batches are trained, or until this is true."""
        self.hung.clear()
        for name in self.names if "hang" in self.events else ():
            self.join(name)
        for _ in range(5000):
            if until() if callable(until) else len(self.trained) >= until:
                return
            self.step(calm=True)
        pytest.fail(f"the buffer is stuck: {self.store.ledger()}")


def by_reward(waiting: Sequence[Waiting], missing: Set[int], want: int) -> list[int]:
    """A user's own policy."""
    return [group.id for group in sorted(waiting, key=lambda group: (group.head.rewards[0], group.id % 7))[:want]]


def in_rounds(dice: random.Random, sizing: str, *, batches: int, zero_variance: bool = True, rows: int = 1000) -> Run:
    """A run in rounds, with more groups than places."""
    rules = {"group_filter": policies.zero_variance if zero_variance else policies.none, "rows": rows}
    rules |= {"interval": dice.choice([1, 1, 2])}
    return Run(dice, lambda: SyncScheduler(SIZINGS[sizing](), oversample_prompts=1.5), ROUNDS, batches=batches, **rules)


def overlapping(dice: random.Random) -> Run:
    """An asynchronous run with all that may happen, under any rules."""
    knobs = {"max_staleness": dice.choice([0, 1, 2, 4, math.inf]), "max_inflight_groups": dice.choice([None, 10])}
    policy = dice.choice([policies.in_order, policies.fifo, by_reward])
    sizing = SIZINGS[dice.choice(list(SIZINGS)) if policy is policies.in_order else "fixed"]
    knobs |= {"oversample_responses": dice.choice([1.0, 1.5])}
    rules = {"batch_policy": partial(policy)}
    rules |= {"staleness_policy": dice.choice(["drop", "requeue", "wait", "mask_tokens"])}
    rules |= {"group_filter": dice.choice([policies.none, policies.zero_variance])}
    rules |= {"lease_timeout": TIMEOUT, "evaluate": dice.choice([0, 3]), "slots": dice.choice([4, 12, 40])}
    rules |= {"interval": dice.choice([1, 1, 2, 3])}
    return Run(dice, lambda: AsyncScheduler(sizing(), **knobs), ALL, **rules)
