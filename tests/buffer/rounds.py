"""A run in rounds, played by dice through the real controller: more groups than places.

Actors push, hand back, fail and end; the learner trains and checkpoints; everything crashes and is made anew from the
journal. `Run.check` is what must hold after every step.
"""

import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from areal_like.types import Completion, Group, PartialSample, Sample
from areal_like.wire.groups import encode_group
from areal_like.wire.partials import encode_partial
from buffer import policies
from buffer.schedulers import SyncScheduler
from buffer.sizing import Fixed, GroupLengths, Sagc, Sizing
from buffer.store import NO_SLOT, Stage
from tests.buffer.house import B, House, table
from tests.buffer.paper import Paper

SIZE = 4


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
    """A run of `batches` batches, driven by `dice`."""

    def __init__(
        self,
        dice: random.Random,
        sizing: str,
        *,
        batches: int,
        staleness: int = 0,
        zero_variance: bool = True,
        rows: int = 1000,
    ):
        self.dice, self.sizing, self.batches, self.staleness = dice, sizing, batches, staleness
        self.rows, self.row_of = rows, dict[int, int]()
        self.carried = 0
        self.filter = partial(policies.zero_variance) if zero_variance else partial(policies.none)
        self.journal = Paper()
        self.checkpoint = 0
        self.trained: list[list[int]] = []
        self.interval = dice.choice([1, 1, 2])
        self.orders: dict[int, list[int]] = {}
        self.begin()

    def begin(self) -> None:
        """Start, for the first time or after a crash of everything."""
        knobs = {"oversample_prompts": 1.5, "max_staleness": self.staleness}
        scheduler = SyncScheduler(SIZINGS[self.sizing](), **knobs)
        resume = self.staleness > 0
        rules = {"group_filter": self.filter, "resume": resume, "interval": self.interval}
        self.house = House(scheduler, actors=3, last_batch=self.batches, rows=self.rows, **rules)
        server = self.house.server
        self.journal.restore(server.groups, self.checkpoint)
        server.learner.steps, server.dispatcher.prompts.position = self.checkpoint, server.store.admitted
        if server.store.scheduler:
            scheduler.load_state_dict(server.store.scheduler)
        del self.trained[self.checkpoint :]
        self.held = dict.fromkeys(self.house.names, -1)
        self.leased: dict[str, dict[int, tuple[int, int, int]]] = {name: {} for name in self.house.names}
        self.running: dict[str, dict[int, int]] = {name: {} for name in self.house.names}  # sequences, by group
        self.ended = dict.fromkeys(self.house.names, 0)
        self.late: list[tuple[str, int, int, int]] = []
        self.seen = 0
        self.served: list[list[int]] = self.trained.copy()
        self.house.hello("learner", *self.house.names, slots=1000)
        self.publish()
        for name in self.house.names:
            self.update(name)
        self.want()

    # ---- the learner ------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return len(self.trained) // self.interval

    def publish(self) -> None:
        self.house.publish(self.version)
        for version in range(self.version):  # those of before a crash
            self.house.server.weights.digests[version] = f"d{version}"

    def want(self) -> None:
        index = len(self.served)
        if index < self.batches:
            self.house.say("learner", "want", {"index": index, "version": index // self.interval})
        self.listen()

    def train(self) -> None:
        if len(self.served) == len(self.trained):
            return
        index = len(self.trained)
        self.want()  # of the next, before this one is trained
        self.trained.append(self.served[index])
        self.house.say("learner", "trained", {"index": index})
        if (index + 1) % self.interval == 0:
            self.publish()
            if self.dice.random() < 0.5:
                self.checkpoint = index + 1
                self.house.say("learner", "checkpointed", {"step": index + 1})
                if self.dice.random() < 0.5:
                    self.journal.rotate(self.house.server.groups)
        self.listen()

    # ---- actors -----------------------------------------------------------------------------------------------------

    def update(self, name: str) -> None:
        self.held[name] = self.version
        self.house.apply(self.version, name)
        self.listen()

    def listen(self) -> None:
        """Handle the buffer's messages; cancels are answered some time later."""
        sent = self.house.router.sent
        while self.seen < len(sent):
            who, kind, body = sent[self.seen]
            self.seen += 1
            if kind == "lease":
                for group_id, row, _, launch, need, *_ in body["leases"]:
                    assert self.row_of.setdefault(group_id, row) == row
                    self.leased[who][group_id] = (launch, need, self.held[who])
                    self.running[who][group_id] = launch
                assert not body["partials"] or self.staleness
                self.carried += len(body["partials"])
                for meta, usable in body["partials"]:
                    assert self.staleness or not usable or set(meta["digests"]) == {self.held[who]}, "on-policy"
            elif kind == "batch":
                self.check_batch(
                    [name[0] for name in body["table"]["groups"]], [name[1] for name in body["table"]["groups"]], body
                )
            assert kind != "refused", body

    def check_batch(self, ids: list[int], samples: list[int], body: dict) -> None:
        assert sum(samples) == B * SIZE and len(set(samples)) == 1, "the effective batch is kept"
        versions = set(body["table"]["digests"])
        oldest = min(versions)
        assert body["version"] - oldest <= self.staleness
        if self.staleness == 0:
            assert versions == {body["version"]}, "strictly on-policy"
        assert self.orders.setdefault(len(self.served), ids) == ids, "after a crash the same groups in the same order"
        self.served.append(ids)

    def push(self, name: str, group_id: int, dull: bool) -> None:
        _, need, version = self.let_go(name, group_id)
        head, payload = head_of(group_id, self.held[name], need, dull, version)
        self.house.say(name, "push", table(head), payload)
        self.listen()

    def let_go(self, name: str, group_id: int) -> tuple[int, int, int]:
        """Remove a group whose sequences have all ended."""
        self.end(name, self.running[name].pop(group_id))
        return self.leased[name].pop(group_id)

    def end(self, name: str, sequences: int) -> None:
        self.ended[name] += sequences
        self.house.say(name, "credit", {"ended": self.ended[name]})

    def end_some(self, name: str) -> None:
        """End some sequences of a group that continues; at least one continues."""
        group_id = self.dice.choice(list(self.running[name]))
        ended = self.dice.randint(0, self.running[name][group_id] - 1)
        self.running[name][group_id] -= ended
        self.end(name, ended)
        self.listen()

    def recalled(self, name: str) -> list[int]:
        entries = self.house.server.store.entries
        return [
            each for each in self.leased[name] if entries[each].stage is Stage.RECALLED and entries[each].actor == name
        ]

    def hand_back(self, name: str, ids: list[int]) -> None:
        left = []
        for group_id in ids:
            launch, need, version = self.let_go(name, group_id)
            self.late.append((name, group_id, need, version))
            tokens = np.zeros(3, np.int32), np.zeros(3, np.float32), [(version, 3)]
            samples = {index: Completion(*tokens, "stop" if index else "abort") for index in range(min(2, launch))}
            partials = {index: PartialSample({(1, 0): call}) for index, call in samples.items()}
            left.append(encode_partial(group_id, partials, {version: f"d{version}"}))
        body = {"ids": ids, "partials": [meta for meta, _ in left], "leaving": False}
        self.house.say(name, "hand_back", body, *(payload for _, payload in left))
        self.listen()

    def push_late(self) -> None:
        """Push a group that was broken off: it had been pushed before, and arrives again."""
        name, group_id, need, version = self.late.pop(self.dice.randrange(len(self.late)))
        entry = self.house.server.store.entries.get(group_id)
        head, payload = head_of(group_id, version, need)
        self.house.say(name, "push", table(head), payload)
        for other in self.house.names:
            if group_id in self.leased[other] and entry and entry.stage in (Stage.WAITING, Stage.SERVED):
                self.let_go(other, group_id)  # else it came too late, and the lease of now goes on
        self.listen()

    def die(self, name: str) -> None:
        self.leased[name].clear()
        self.running[name].clear()
        self.ended[name] = 0
        self.house.hello(name, slots=1000)
        self.update(name)

    def step(self, calm: bool = False) -> None:
        dice, name = self.dice, self.dice.choice(self.house.names)
        running = list(self.leased[name])
        match dice.choice(
            ["push"] * 6
            + ["update", "update", "back", "train", "train", "end"]
            + ["die", "fail", "crash", "late"] * (not calm)
        ):
            case "push" if running:
                self.push(name, dice.choice(running), not calm and dice.random() < 0.15)
            case "end" if running:
                self.end_some(name)
            case "update":
                self.update(name)
            case "back":
                self.hand_back(name, self.recalled(name))
            case "train":
                self.train()
            case "late" if self.late:
                self.push_late()
            case "die" if dice.random() < 0.3:
                self.die(name)
            case "fail" if running and dice.random() < 0.3:
                group_id = dice.choice(running)
                self.let_go(name, group_id)
                self.house.say(name, "failed", {"id": group_id, "reason": "rejected", "detail": ""})
                self.listen()
            case "crash" if dice.random() < 0.2:
                self.journal.check(self.house.server.groups, self.house.server.groups.bound)
                self.begin()
        self.check()

    def check(self) -> None:
        replay = self.house.server.groups
        ledger = replay.store.ledger()
        gone = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
        assert ledger["admitted"] == gone + ledger["active"]
        held = [entry.slot for entry in replay.store.entries.values() if entry.slot != NO_SLOT]
        assert sorted(held + replay.store.slots.free) == list(range(replay.store.trained, replay.store.slots.end))
        for entry in replay.store.entries.values():
            assert (entry.slot == NO_SLOT) == (entry.stage is Stage.DEFERRED or entry.id in replay.store.redundant)
            has_slot = {Stage.QUEUED, Stage.RUNNING, Stage.WAITING, Stage.SERVED}
            assert entry.slot == NO_SLOT or entry.stage not in (Stage.REDUNDANT, Stage.DEFERRED)
            assert entry.slot != NO_SLOT or entry.stage not in has_slot
        ids = [each for batch in self.served for each in batch]
        assert len(ids) == len(set(ids)), "a prompt was trained twice"

    def go_to_the_end(self) -> None:
        """All actors are honest until the data is used up."""
        for _ in range(5000):
            if len(self.trained) == self.batches:
                break
            self.step(calm=True)
        else:
            pytest.fail("the buffer is stuck")
