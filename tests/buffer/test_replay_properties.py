"""Random histories of the buffer's core: the bound, conservation, exactly-once and progress must hold in every one.

The model: actors that hold some version, run groups, push them (with tokens as old as their lease, updates in flight
included), hand them back unfinished for others to go on from, fail, and end; a learner that asks for a batch ahead,
trains, publishes and checkpoints; a buffer that crashes and is made anew from its journal, with the learner back at its
checkpoint. Every policy, staleness policy, filter and sampler. Time and sockets play no part here. The environment's
HISTORIES sets how many histories are tried in all.
"""

import math
import os
from collections.abc import Sequence, Set
from functools import partial
from itertools import product

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal_like.wire.groups import Head, make_head
from areal_like.wire.partials import versions_of
from buffer import policies
from buffer.events import Admit, Drop, Filter
from buffer.groups import GroupManager
from buffer.policies import Waiting, fifo, in_order, windowed
from buffer.prompts import PromptCursor
from buffer.recovery import standing
from buffer.results import Results
from buffer.samplers import pass_rate_pools
from buffer.segment_file import load
from buffer.staleness import Bound
from buffer.store import LEASED, UNFINISHED, Entry, PartialGroup, Stage, Store
from tests.buffer.house import partial_group
from tests.buffer.paper import Paper

ACTORS = ("a", "b", "c")
HISTORIES = int(os.environ.get("HISTORIES", "800"))
PICK = st.integers(0, 999)


def by_reward(waiting: Sequence[Waiting], missing: Set[int], want: int) -> list[int]:
    """A user's own policy."""
    return [group.id for group in sorted(waiting, key=lambda group: group.head.rewards[0])[:want]]


POLICIES = {
    "in_order": partial(in_order),
    "fifo": partial(fifo),
    "windowed": partial(windowed),
    "by_reward": partial(by_reward),
}
STALENESS_POLICIES = ("wait", "drop", "requeue", "mask_tokens")
FILTERS = {"none": partial(policies.none), "zero_variance": partial(policies.zero_variance)}
SAMPLERS = {
    "in_order": None,
    "pools": partial(pass_rate_pools),
}
ROWS = 13


def head_of(group_id: int, oldest: int, newest: int, rewards: tuple[float, float]) -> Head:
    runs = [(oldest, 3), (newest, 2)] if newest > oldest else [(oldest, 5)]
    rows = [(1, 5, 0, len(runs), rewards[0]), (1, 5, 0, 1, rewards[1])]
    return make_head(group_id, rows, [*runs, (newest, 5)], dict.fromkeys((oldest, newest), "digest"))


def partial_of(group_id: int, versions: list[int]) -> PartialGroup:
    """versions[i] has made sample i; the newest has also made the last one."""
    made = [[(version, 2)] for version in versions]
    made[-1].append((max(versions), 1))
    return PartialGroup(*partial_group(group_id, *made))


def payload_of(head: Head) -> bytes:
    return bytes([head.id % 256]) * head.size


def content(left: PartialGroup | None) -> tuple | None:
    return (left.head, load(left.payload)) if left else None


class BufferHistory(RuleBasedStateMachine):
    policy = "in_order"
    staleness_policy = "drop"

    @initialize(
        bound=st.builds(
            Bound, st.sampled_from([1, 0, 2, 4, math.inf]), st.sampled_from([3, 1, 2, 4]), st.sampled_from([1, 2, 3])
        ),
        group_filter=st.sampled_from(list(FILTERS)),
        resume=st.booleans(),
        sampler=st.sampled_from(list(SAMPLERS)),
    )
    def start(self, bound: Bound, group_filter: str, resume: bool, sampler: str) -> None:
        self.bound, self.resume, self.sampler = bound, resume, SAMPLERS[sampler]
        self.whole = True
        self.filter = FILTERS[group_filter]
        self.held = dict.fromkeys(ACTORS, 0)
        self.journal = Paper()
        self.published = self.batches = self.checkpoint = self.next_id = 0
        self.honest = True
        self.serving: list[int] = []
        self.composition: dict[int, list[int]] = {}
        self.trained: list[list[int]] = []
        self.replay = self.new_replay()
        self.replay.record = self.journal.append

    @property
    def store(self) -> Store:
        return self.replay.store

    def new_replay(self) -> GroupManager:
        bound = self.bound
        self.bound = Bound(bound.max_staleness, bound.groups_per_batch, bound.interval)
        results = Results() if self.sampler else None
        rules = POLICIES[self.policy], self.staleness_policy, self.filter, self.resume
        replay = GroupManager(self.bound, *rules, results=results)
        self.prompts = PromptCursor(ROWS, 0, self.next_id, self.sampler, results)
        return replay

    def running(self, actor: str) -> list[Entry]:
        return [e for e in self.store.of(*LEASED) if e.actor == actor]

    # ---- actors -----------------------------------------------------------------------------------------------------

    @rule(actor=st.sampled_from(ACTORS), n=st.integers(1, 6))
    def admit(self, actor: str, n: int) -> None:
        version = self.held[actor]
        for _ in range(n):
            entry = self.replay.queued_for(version)
            if entry:
                self.carry_on(entry, actor, version)
            elif self.replay.room(version) > 0 and (len(self.store.entries) < 40 or self.is_awaited):
                self.open_batches()
                group_id, row, task = self.prompts.next()
                assert group_id == self.next_id
                self.replay.admit(group_id, row, 8, 8, actor, version, 0.0, task=task)
                self.next_id += 1
            else:
                return

    def open_batches(self) -> None:
        """A batch is opened before its first group is admitted."""
        while self.sampler and self.bound.batches.end <= self.store.slots.next:
            self.replay.open_batch(self.bound.groups_per_batch, None)

    @property
    def is_awaited(self) -> bool:
        """The next slot belongs to the batch that is trained next."""
        return self.store.slots.next < self.bound.batches.first(self.batches + 1)

    def carry_on(self, entry: Entry, actor: str, version: int) -> None:
        """A lease carries exactly those samples that may be trained in the group's slot."""
        left, train_version = entry.partial, self.bound.slot_version(entry.slot)
        carried = self.replay.assign(entry, actor, version)
        made = {index: min(versions) for index, versions in versions_of(left.head).items()} if left else {}
        masks = self.staleness_policy == "mask_tokens"
        assert carried == {
            index: oldest
            for index, oldest in made.items()
            if masks or train_version - oldest <= self.bound.max_staleness
        }
        assert entry.lease_version == min([version, *carried.values()]) and bool(entry.partial) == bool(carried)

    @rule(actor=st.sampled_from(ACTORS), n=st.integers(1, 4), pick=PICK, begun=st.booleans())
    def hand_back(self, actor: str, n: int, pick: int, begun: bool) -> None:
        """An actor leaves, or is asked for a group; any versions since the lease have made its samples."""
        for entry in self.running(actor)[pick % 3 :][:n]:
            ages = range(entry.lease_version, self.held[actor] + 1)
            versions = [ages[(pick // step) % len(ages)] for step in (1, 3, 7)]
            before, left = content(entry.partial), partial_of(entry.id, versions) if begun else None
            self.replay.hand_back(entry.id, left)
            assert entry.stage is Stage.QUEUED
            assert content(entry.partial) == (content(left) if left and self.resume else before)

    @rule(pick=PICK)
    def recall(self, pick: int) -> None:
        entries = self.store.of(*LEASED)
        if entries:
            self.replay.recall(entries[pick % len(entries)].id)

    @rule(actor=st.sampled_from(ACTORS), n=st.integers(1, 4), pick=PICK, dull=st.booleans())
    def push(self, actor: str, n: int, pick: int, dull: bool) -> None:
        """Push any of its groups, made by any versions that the actor has had since the lease."""
        for _ in range(n):
            entries = self.running(actor)
            if not entries:
                return
            entry, held = entries[pick % len(entries)], self.held[actor]
            oldest = entry.lease_version + pick % (held - entry.lease_version + 1)
            newest = held - (pick // 7) % (held - oldest + 1)
            head = head_of(entry.id, oldest, newest, (1.0, 1.0) if dull else (entry.id * 37 % 101 / 200, 1.0))
            assert self.replay.push(head, payload_of(head), self.published, 0.0)
            assert not self.replay.push(head, payload_of(head), self.published, 0.0), "a duplicate was taken"

    @rule(actor=st.sampled_from(ACTORS), updated=st.booleans())
    def finish_all(self, actor: str, updated: bool) -> None:
        """All its groups end; long ones after an in-flight update."""
        if updated:
            self.apply_weights(actor)
        for entry in self.running(actor):
            head = head_of(entry.id, entry.lease_version, self.held[actor], (entry.id * 37 % 101 / 200, 1.0))
            assert self.replay.push(head, payload_of(head), self.published, 0.0)

    @rule(pick=PICK)
    def push_from_a_liar(self, pick: int) -> None:
        """A rollout from weights older than its lease states: only the check at serving can find it."""
        entries = self.store.of(*UNFINISHED)
        if entries:
            self.honest = False
            head = head_of(entries[pick % len(entries)].id, 0, 0, (0.0, 1.0))
            assert self.replay.push(head, payload_of(head), self.published, 0.0)

    @rule(pick=PICK, filtered=st.booleans())
    def leave_untrained(self, pick: int, filtered: bool) -> None:
        ids = [entry.id for entry in self.store.of(*UNFINISHED)]
        if ids:
            group_id = ids[pick % len(ids)]
            self.replay.commit(Filter(group_id, "dull") if filtered else Drop(group_id, "failed"))

    @rule(actor=st.sampled_from(ACTORS))
    def die(self, actor: str) -> None:
        for entry in self.running(actor):
            self.replay.requeue(entry.id)

    @rule(actor=st.sampled_from(ACTORS))
    def apply_weights(self, actor: str) -> None:
        self.held[actor] = self.published

    # ---- the learner ------------------------------------------------------------------------------------------------

    @rule(
        slow=st.sampled_from(ACTORS),
        rounds=st.integers(1, 8),
        pick=PICK,
        hand_back=st.booleans(),
        rotate=st.booleans(),
    )
    def all_but_one_go_on(self, slow: str, rounds: int, pick: int, hand_back: bool, rotate: bool) -> None:
        """Groups of a slow actor become stragglers while the learner trains, and perhaps the journal is rotated; other
        actors may continue from its partial groups."""
        self.apply_weights(slow)
        self.admit(slow, 2)
        for _ in range(rounds):
            for actor in ACTORS:
                if actor != slow:
                    self.apply_weights(actor)
                    self.admit(actor, 4)
                    self.push(actor, 3, pick, False)
            self.serve()
            if self.serving:
                self.train(rotate, rotate)
        if hand_back:
            self.hand_back(slow, 4, pick, True)
            for actor in ACTORS:
                self.apply_weights(actor)
                self.admit(actor, 2)

    @rule()
    def serve(self) -> None:
        if not self.serving:
            self.serve_ahead(self.batches)

    def serve_ahead(self, batch: int) -> None:
        entries = self.replay.serve(batch)
        for actor, group_id, hand_back in self.replay.take_cancels():
            assert actor in ACTORS or (hand_back and group_id not in self.store.entries)
            if not hand_back:
                assert self.staleness_policy in ("drop", "requeue") and self.policy != "in_order"
                assert group_id not in self.store.entries or self.store.entries[group_id].stage is Stage.QUEUED
        if entries:
            ids = [entry.id for entry in entries]
            assert ids == self.composition.setdefault(batch, ids), "after a crash, a batch was put together differently"
            self.check_bound(batch, entries)
            self.serving = ids

    def check_bound(self, batch: int, entries: list[Entry]) -> None:
        version, allowed = self.bound.batch_version(batch), self.replay.oldest_allowed(batch)
        assert len(entries) == self.bound.groups_per_batch
        for entry in entries:
            versions = set(entry.head.versions)
            trained = {made for made in versions if made >= allowed}
            assert trained and version - min(trained) <= self.bound.max_staleness, "the bound was broken"
        if self.policy == "in_order":
            first = batch * self.bound.groups_per_batch
            assert [entry.slot for entry in entries] == list(range(first, first + len(entries)))

    @precondition(lambda self: self.serving)
    @rule(checkpoint=st.booleans(), rotate=st.booleans())
    def train(self, checkpoint: bool, rotate: bool) -> None:
        assert self.replay.finish(self.batches) == len(self.serving)
        self.trained.append(self.serving)
        self.serving = []
        self.batches += 1
        self.published = self.bound.batch_version(self.batches)
        if checkpoint and self.batches % self.bound.interval == 0:
            self.checkpoint = self.batches
            if rotate:
                self.journal.rotate(self.replay)
                self.whole = False

    @precondition(lambda self: self.serving)
    @rule(ahead=st.booleans(), pick=PICK, lost=st.booleans())
    def set_aside(self, ahead: bool, pick: int, lost: bool) -> None:
        """The learner can't train a batch, whether or not a later one is served; or the disk has lost a payload."""
        if ahead and (entries := self.replay.serve(self.batches + 1)):
            self.check_bound(self.batches + 1, entries)
        self.replay.take_cancels()
        faulty = [entry.id for entry in self.replay.unserve(self.batches)]
        assert sorted(faulty) == sorted(self.serving)
        if lost:
            self.replay.requeue(faulty[pick % len(faulty)])
        else:
            for group_id in faulty:
                self.replay.drop(group_id, "untrainable")
        self.composition = {batch: ids for batch, ids in self.composition.items() if batch < self.batches}
        self.serving = []

    @rule()
    def crash(self) -> None:
        """Everything crashes: only the journal and the learner's checkpoint are left."""
        self.journal.check(self.replay, self.bound)
        if self.whole and self.sampler:
            self.check_prompts()
        admitted = self.store.admitted
        left = {e.id: content(e.partial) for e in self.store.entries.values() if e.partial}
        self.replay = self.new_replay()
        self.journal.restore(self.replay, self.checkpoint)
        assert self.store.admitted == admitted
        kept = {e.id: content(e.partial) for e in self.store.entries.values()}
        assert {group_id: kept.get(group_id) for group_id in left} == left
        assert all(load(e.payload) == payload_of(e.head) for e in self.store.entries.values() if e.head)
        self.batches = self.checkpoint
        self.published = self.bound.batch_version(self.batches)
        self.held = dict.fromkeys(ACTORS, self.published)
        self.serving, self.trained = [], self.trained[: self.checkpoint]

    def check_prompts(self) -> None:
        """The records determine the prompts that the sampler chose."""
        results = Results()
        prompts, store = PromptCursor(ROWS, 0, 0, self.sampler, results), Store(Bound(math.inf, 1), results=results)
        for event, payload in standing(tuple(self.journal.records)):
            if isinstance(event, Admit):
                assert (event.id, event.row, event.task) == prompts.next()
            store.apply(event, payload)

    # ---- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def ledger_balances(self) -> None:
        if hasattr(self, "replay"):
            ledger = self.store.ledger()
            gone = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
            assert ledger["admitted"] == gone + ledger["active"] == self.next_id
            assert ledger["trained"] == self.batches * self.bound.groups_per_batch
            assert self.store.bytes == sum(
                len(e.payload) + (len(e.partial.payload) if e.partial else 0) for e in self.store.entries.values()
            )

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        """Each slot is held by one active group, free, or trained: capacity can't drift."""
        if hasattr(self, "replay"):
            held = [entry.slot for entry in self.store.entries.values()]
            assert sorted(held + self.store.slots.free) == list(range(self.store.trained, self.store.slots.end))

    @invariant()
    def the_lowest_slot_comes_first(self) -> None:
        if hasattr(self, "replay"):
            queued, lowest = self.store.first_queued, self.store.lowest_open
            assert (queued and queued.slot) == min((e.slot for e in self.store.of(Stage.QUEUED)), default=None)
            open_slots = [*self.store.slots.free, *(e.slot for e in self.store.of(*UNFINISHED))]
            assert (lowest and lowest[0]) == min(open_slots, default=None)

    @invariant()
    def trained_at_most_once(self) -> None:
        if hasattr(self, "replay"):
            ids = [group_id for batch in self.trained for group_id in batch] + self.serving
            assert len(set(ids)) == len(ids)

    @invariant()
    def nothing_is_stale_while_all_wait(self) -> None:
        if hasattr(self, "replay") and self.honest and (self.staleness_policy == "wait" or self.policy == "in_order"):
            assert self.store.dropped["stale"] == 0

    def teardown(self) -> None:
        """Progress: if all actors are honest from now on, the next batches can always be completed."""
        if not hasattr(self, "replay"):
            return
        for _ in range(self.bound.interval + 2):
            if self.serving:
                self.train(False, False)
            self.work_until_served()

    def work_until_served(self) -> None:
        for _ in range(100):
            for actor in ACTORS:
                self.finish_all(actor, True)
            self.serve_ahead(self.batches)
            if self.serving:
                return
            self.admit("a", 4)
        pytest.fail("the buffer is stuck")


for policy_name, staleness_name in product(POLICIES, STALENESS_POLICIES):
    name = f"Test_{policy_name}_{staleness_name}"
    machine = type(name, (BufferHistory,), {"policy": policy_name, "staleness_policy": staleness_name})
    globals()[name] = machine.TestCase
    globals()[name].settings = settings(
        max_examples=HISTORIES // (len(POLICIES) * len(STALENESS_POLICIES)),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
