"""Rounds with more groups than places, through the real controller: random histories with deaths, filters and crashes.

Every prompt is trained exactly once (or counted under the reason why not), strictly on-policy, whatever happens.
"""

import os
import random
from functools import partial

import msgpack
import numpy as np
import pytest

from areal_like.config import load
from areal_like.groups import encode_group
from areal_like.partials import encode_partial
from areal_like.types import Completion, Group, Sample, SoFar
from buffer import filters
from buffer.admission import Bound
from buffer.entries import NO_SLOT, Stage
from buffer.journal import SNAPSHOT, Record
from buffer.policies import in_order
from buffer.recovery import restore, snapshot
from buffer.replay import Replay
from buffer.schedulers import SyncScheduler
from buffer.sizing import Fixed, Sagc
from scripts.preflight import preflight
from tests.buffer.house import B, House, table

HISTORIES = int(os.environ.get("HISTORIES", "2400")) // 20
SIZE = 4
SIZINGS = {
    "fixed": lambda: Fixed(group_size=SIZE),
    "sagc": lambda: Sagc(group_size=SIZE, candidates=[2, 4, 8], budget=0.2),
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
    """A run of `batches` batches, played by `dice`."""

    def __init__(
        self, dice: random.Random, sizing: str, *, batches: int, staleness: int = 0, zero_variance: bool = True
    ):
        self.dice, self.sizing, self.batches, self.staleness = dice, sizing, batches, staleness
        self.filter = partial(filters.zero_variance) if zero_variance else partial(filters.none)
        self.records: list[Record] = []
        self.checkpoint = 0
        self.trained: list[list[int]] = []
        self.interval = dice.choice([1, 1, 2])
        self.streams = dice.random() < 0.5
        self.orders: dict[int, list[int]] = {}
        self.begin()

    def begin(self) -> None:
        """The first time, or after a crash of everything."""
        scheduler = SyncScheduler(SIZINGS[self.sizing](), oversample_prompts=1.5, max_staleness=self.staleness)
        rules = {"group_filter": self.filter, "resume": self.staleness > 0, "interval": self.interval}
        self.house = House(scheduler, actors=3, last_batch=self.batches, **rules)
        state = self.house.state
        restore(state.replay, self.records, self.checkpoint, 0.0, self.append)
        state.steps, state.prompts.position = self.checkpoint, state.replay.admitted
        if state.replay.scheduler_state:
            scheduler.load_state_dict(state.replay.scheduler_state)
        del self.trained[self.checkpoint :]
        self.held = dict.fromkeys(self.house.names, -1)
        self.leased: dict[str, dict[int, tuple[int, int, int]]] = {name: {} for name in self.house.names}
        self.late: list[tuple[str, int, int, int]] = []
        self.seen = 0
        self.served: list[list[int]] = self.trained.copy()
        self.house.hello("learner", *self.house.names, slots=1000)
        if self.streams:
            self.house.say("learner", "stream", {})
        self.publish()
        for name in self.house.names:
            self.update(name)
        self.want()

    def append(self, kind: str, fields: list, payload: bytes) -> None:
        self.records.append(
            Record(*msgpack.unpackb(msgpack.packb([kind, fields]), strict_map_key=False), bytes(payload))
        )

    # ---- the learner ------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return len(self.trained) // self.interval

    def publish(self) -> None:
        self.house.publish(self.version)
        for version in range(self.version):  # those of before a crash
            self.house.state.digests[version] = f"d{version}"

    def want(self) -> None:
        index = len(self.served)
        self.parts: list[int] = []
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
                    fields, payload = snapshot(self.house.state.replay)
                    self.records.clear()
                    self.append(SNAPSHOT, fields, payload)
        self.listen()

    # ---- actors -----------------------------------------------------------------------------------------------------

    def update(self, name: str) -> None:
        self.held[name] = self.version
        self.house.apply(self.version, name)
        self.listen()

    def listen(self) -> None:
        """Take what the buffer has said; cancels are answered some time later."""
        sent = self.house.router.sent
        while self.seen < len(sent):
            who, kind, body = sent[self.seen]
            self.seen += 1
            if kind == "lease":
                for group_id, _, _, launch, need, *_ in body["leases"]:
                    self.leased[who][group_id] = (launch, need, self.held[who])
                carried = {meta["id"]: usable for meta, usable in body["partials"]}
                assert not carried or self.staleness
            elif kind == "part":
                assert self.streams and body["index"] == len(self.served) and body["begin"] == len(self.parts)
                self.parts += [name[0] for name in body["groups"]]
                assert self.staleness or set(body["digests"]) == {body["version"]}, "strictly on-policy"
            elif kind == "batch":
                self.check_batch([name[0] for name in body["groups"]], [name[1] for name in body["groups"]], body)
            assert kind != "refused", body

    def check_batch(self, ids: list[int], samples: list[int], body: dict) -> None:
        assert sum(samples) == B * SIZE and len(set(samples)) == 1, "the effective batch is kept"
        versions = set(body["digests"])
        oldest = min(versions)
        assert body["version"] - oldest <= self.staleness
        if self.staleness == 0:
            assert versions == {body["version"]}, "strictly on-policy"
        assert ids[: len(self.parts)] == self.parts, "what was taken early is the batch's beginning"
        assert self.orders.setdefault(len(self.served), ids) == ids, "after a crash the same groups in the same order"
        self.served.append(ids)

    def push(self, name: str, group_id: int, dull: bool) -> None:
        _, need, version = self.leased[name].pop(group_id)
        self.house.say(name, "credit", {"ended": 10**6})
        head, payload = head_of(group_id, self.held[name], need, dull, version)
        self.house.say(name, "push", table(head), payload)
        self.listen()

    def recalled(self, name: str) -> list[int]:
        entries = self.house.state.replay.entries
        return [each for each in self.leased[name] if entries[each].recalled and entries[each].actor == name]

    def give_back(self, name: str, ids: list[int]) -> None:
        left = []
        for group_id in ids:
            _, need, version = self.leased[name].pop(group_id)
            self.late.append((name, group_id, need, version))
            call = Completion(np.zeros(3, np.int32), np.zeros(3, np.float32), [(version, 3)], "abort")
            left.append(encode_partial(group_id, {0: SoFar({(1, 0): call})}, {version: f"d{version}"}))
        body = {"ids": ids, "partials": [meta for meta, _ in left], "leaving": False}
        self.house.say(name, "give_back", body, *(payload for _, payload in left))
        self.listen()

    def push_late(self) -> None:
        """Of a group that was broken off: it had been pushed before, and comes again."""
        name, group_id, need, version = self.late.pop(self.dice.randrange(len(self.late)))
        entry = self.house.state.replay.entries.get(group_id)
        if entry is None or entry.need == need:
            head, payload = head_of(group_id, version, need)
            self.house.say(name, "push", table(head), payload)
            self.leased[name].pop(group_id, None)
            for other in self.leased.values():
                if entry and entry.stage is Stage.WAITING:
                    other.pop(group_id, None)
            self.listen()

    def die(self, name: str) -> None:
        self.leased[name].clear()
        self.house.hello(name, slots=1000)
        self.update(name)

    def step(self, calm: bool = False) -> None:
        dice, name = self.dice, self.dice.choice(self.house.names)
        running = list(self.leased[name])
        match dice.choice(
            ["push"] * 6
            + ["update", "update", "back", "train", "train"]
            + ["die", "fail", "crash", "late"] * (not calm)
        ):
            case "push" if running:
                self.push(name, dice.choice(running), not calm and dice.random() < 0.15)
            case "update":
                self.update(name)
            case "back":
                self.give_back(name, self.recalled(name))
            case "train":
                self.train()
            case "late" if self.late:
                self.push_late()
            case "die" if dice.random() < 0.3:
                self.die(name)
            case "fail" if running and dice.random() < 0.3:
                group_id = dice.choice(running)
                del self.leased[name][group_id]
                self.house.say(name, "failed", {"id": group_id, "reason": "rejected", "detail": ""})
                self.listen()
            case "crash" if dice.random() < 0.2:
                self.begin()
        self.check()

    def check(self) -> None:
        replay = self.house.state.replay
        ledger = replay.ledger()
        gone = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
        assert ledger["admitted"] == gone + ledger["active"]
        held = [entry.slot for entry in replay.entries.values() if entry.slot != NO_SLOT]
        assert sorted(held + replay.slots.free) == list(range(replay.trained, replay.slots.end))
        for entry in replay.entries.values():
            assert (entry.slot == NO_SLOT) == (entry.stage is Stage.DEFERRED or entry.id in replay.spares)
        ids = [each for batch in self.served for each in batch]
        assert len(ids) == len(set(ids)), "a prompt was trained twice"

    def end(self) -> None:
        """All go on honestly until the data is used up."""
        for _ in range(5000):
            if len(self.trained) == self.batches:
                break
            self.step(calm=True)
        else:
            pytest.fail("the buffer is stuck")


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("sizing", SIZINGS)
def test_every_prompt_is_trained_once_whatever_happens(sizing: str, staleness: int) -> None:
    for number in range(HISTORIES // 4):
        dice = random.Random(number)
        run = Run(dice, sizing, batches=8, staleness=staleness)
        for _ in range(dice.randint(0, 120)):
            run.step()
        run.end()
        ledger = run.house.state.replay.ledger()
        assert not set(ledger["dropped"]) - {"rejected"}, ledger
        if sizing == "fixed":
            assert ledger["active"] == 0, "the end of the data has flushed the queue"
            left = sum(ledger["filtered"].values()) + ledger["dropped"].get("rejected", 0)
            assert ledger["admitted"] == ledger["trained"] + left == 8 * B + left


def started(scheduler: SyncScheduler, **rules) -> House:
    house = House(scheduler, **rules)
    house.start()
    house.say("learner", "want", {"index": 0, "version": 0})
    return house


def owner(house: House, group_id: int) -> str:
    return next(name for name in house.names if group_id in house.leases(name))


def test_the_first_done_are_kept_and_the_others_are_recalled_in_the_same_turn() -> None:
    house = started(SyncScheduler(Fixed(group_size=8), oversample_prompts=1.5))
    launched = sorted(house.leases())
    assert launched == list(range(6)) and len(house.state.replay.spares) == 2
    for group_id in (5, 4, 3, 2):
        assert not [body for _, kind, body in house.router.sent if kind == "cancel"]
        house.push(owner(house, group_id), group_id, 0)
    assert sorted(house.batches()[0]) == [2, 3, 4, 5]
    cancels = [(who, body) for who, kind, body in house.router.sent if kind == "cancel"]
    assert sorted(cancels, key=str) == sorted(
        ((owner(house, i), {"ids": [i], "give_back": True}) for i in (0, 1)), key=str
    )
    for group_id in (0, 1):
        house.say(owner(house, group_id), "give_back", {"ids": [group_id], "partials": [], "leaving": False})
    assert [entry.id for entry in house.state.replay.in_stage(Stage.DEFERRED)] == [0, 1]
    house.push(owner(house, 0), 0, 0)
    assert house.state.replay.entries[0].stage is Stage.DEFERRED, "too late: its round is closed"


def test_a_long_round_takes_from_the_queue_alone_first_in_first_out() -> None:
    house = started(SyncScheduler(Fixed(group_size=8), oversample_prompts=1.5))
    deferred: list[int] = []
    for batch in range(3):
        running = sorted(entry.id for entry in house.state.replay.in_stage(Stage.RUNNING))
        if batch == 2:
            assert running == sorted(deferred) and house.state.scheduler.long
        for group_id in running[-B:]:
            house.push(house.state.replay.entries[group_id].actor, group_id, batch)
        for group_id in running[:-B]:
            actor = house.state.replay.entries[group_id].actor
            house.say(actor, "give_back", {"ids": [group_id], "partials": [], "leaving": False})
        deferred += running[:-B]
        house.say("learner", "trained", {"index": batch})
        house.publish(batch + 1)
        house.apply(batch + 1)
        house.say("learner", "want", {"index": batch + 1, "version": batch + 1})
    assert [sorted(ids) for ids in house.batches()] == [[2, 3, 4, 5], [8, 9, 10, 11], [0, 1, 6, 7]]
    assert not house.state.scheduler.long


def test_cut_samples_go_on_only_where_the_bound_lets_them() -> None:
    with pytest.raises(ValueError, match="strictly on-policy"):
        SyncScheduler(Fixed(), max_staleness=2)
    SyncScheduler(Fixed(), max_staleness=2, oversample_prompts=1.25)


def test_groups_that_are_filtered_are_refilled_and_long_prompts_come_all_the_same() -> None:
    """Dynamic sampling: most groups teach nothing; those that were cut are not forgotten."""
    dice = random.Random(1)
    run = Run(dice, "fixed", batches=12)
    first_cut: dict[int, int] = {}
    for _ in range(4000):
        if len(run.trained) == run.batches:
            break
        for entry in run.house.state.replay.in_stage(Stage.DEFERRED):
            first_cut.setdefault(entry.id, len(run.trained))
        name = dice.choice(run.house.names)
        if run.leased[name] and dice.random() < 0.8:
            run.push(name, max(run.leased[name]), dice.random() < 0.7)
        else:
            run.step(calm=True)
    trained_in = {group_id: number for number, ids in enumerate(run.trained) for group_id in ids}
    waits = [trained_in[each] - cut for each, cut in first_cut.items() if each in trained_in]
    assert len(run.trained) == 12 and run.house.state.replay.ledger()["active"] == 0 and waits
    assert max(waits) <= 6, "each 1.5 x 4 start, so every third round is long"


def test_a_learner_that_streams_gets_groups_as_they_finish_and_the_batch_in_that_order() -> None:
    house = started(SyncScheduler(Fixed(group_size=8), oversample_prompts=1.5))
    house.say("learner", "stream", {})
    told: list[list[int]] = []
    for group_id in (5, 1, 4, 0):
        house.push(owner(house, group_id), group_id, 0)
        told = [[name[0] for name in body["groups"]] for _, kind, body in house.router.sent if kind == "part"]
    assert told == [[5], [1], [4]], "the last one comes with the batch"
    assert house.batches() == [[5, 1, 4, 0]]
    assert house.state.replay.count(Stage.SERVED) == 4 and house.state.replay.entries[5].slot == 0


def test_without_asking_batches_are_in_the_order_of_the_prompts_and_come_whole() -> None:
    house = started(SyncScheduler(Fixed(group_size=8)))
    for group_id in (3, 1, 2, 0):
        house.push(owner(house, group_id), group_id, 0)
    assert house.batches() == [[0, 1, 2, 3]]
    assert not [kind for _, kind, _ in house.router.sent if kind == "part"]


@pytest.mark.parametrize("versions", [(0, 0), (1, 2), (2, 2)])
def test_strict_rounds_serve_nothing_but_the_current_version(versions: tuple[int, int]) -> None:
    """The last check, behind admission: whatever was let in, neither an older nor a newer token is trained."""
    replay = Replay(Bound(0, 1), partial(in_order))
    for group_id, made in enumerate([(0, 0), versions]):
        replay.admit(group_id, group_id, 2, 2, "a", 0, 0.0)
        head, payload = head_of(group_id, made[1], 2, oldest=made[0])
        replay.push(head, payload, 1, 0.0)
    assert [entry.id for entry in replay.serve(0)] == [0]
    replay.finish(0)
    if versions[0] < 1:
        assert replay.serve(1) == [] and replay.dropped["stale"] == 1
    else:
        with pytest.raises(RuntimeError, match="off-policy"):
            replay.serve(1)


def test_going_on_from_older_tokens_says_that_it_is_off_policy() -> None:
    assert SyncScheduler(Fixed(), oversample_prompts=1.25).warning() == ""
    warned = SyncScheduler(Fixed(), oversample_prompts=1.25, max_staleness=2).warning()
    assert "no longer strictly on-policy" in warned
    overrides = ["mode=sync", "scheduler.oversample_prompts=1.25", "scheduler.max_staleness=2"]
    assert preflight(load(["quickstart", *overrides])) == warned
    assert preflight(load(["quickstart", *overrides, "partial_rollout=restart"])) == ""
