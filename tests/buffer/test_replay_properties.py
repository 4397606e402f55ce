"""Random histories of the buffer's core: the bound, conservation, exactly-once and order must hold in every one.

The model: actors that hold some version, run groups, push them (with tokens as old as their lease, updates in flight
included), fail, and die; a learner that trains batches and publishes. Time and sockets play no part here.
"""

import math
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from buffer.admission import Bound
from buffer.policies import in_order
from buffer.replay import Replay, Stage

ACTORS = ("a", "b", "c")


def meta_of(group_id: int, oldest: int) -> dict:
    return {"id": group_id, "oldest": oldest, "bytes": 4}


class BufferHistory(RuleBasedStateMachine):
    @initialize(
        bound=st.builds(Bound, st.sampled_from([0, 1, 2, 4, math.inf]), st.integers(1, 4), st.integers(1, 3)),
        policy=st.sampled_from(["drop", "requeue"]),
    )
    def start(self, bound: Bound, policy: str) -> None:
        self.bound = bound
        self.replay = Replay(bound, partial(in_order), policy)
        self.held = dict.fromkeys(ACTORS, 0)
        self.lease_version: dict[int, int] = {}
        self.published = 0
        self.batches = 0
        self.next_id = 0
        self.serving: list[int] = []
        self.trained_ids: list[int] = []
        self.trained_slots: list[int] = []

    def running(self, actor: str) -> list[int]:
        return [e.id for e in self.replay.in_stage(Stage.RUNNING) if e.actor == actor]

    @rule(actor=st.sampled_from(ACTORS), n=st.integers(1, 4))
    def admit(self, actor: str, n: int) -> None:
        for _ in range(n):
            entry = self.replay.queued_for(self.held[actor])
            if entry:
                self.replay.assign(entry, actor)
            elif self.replay.room(self.held[actor]) > 0 and len(self.replay.entries) < 40:
                entry = self.replay.admit(self.next_id, self.next_id, 8, 8, actor, 0.0)
                self.next_id += 1
            else:
                return
            self.lease_version[entry.id] = self.held[actor]

    @rule(data=st.data(), actor=st.sampled_from(ACTORS))
    def push(self, data: st.DataObject, actor: str) -> None:
        ids = self.running(actor)
        if ids:
            group_id = data.draw(st.sampled_from(ids))
            oldest = data.draw(st.integers(self.lease_version[group_id], self.held[actor]))
            assert self.replay.push(meta_of(group_id, oldest), b"1234", self.published, 0.0)
            assert not self.replay.push(meta_of(group_id, oldest), b"1234", self.published, 0.0), (
                "a duplicate was taken"
            )

    @rule(data=st.data())
    def push_from_a_liar(self, data: st.DataObject) -> None:
        """A rollout on weights that are older than its lease says: only the check at serving can catch it."""
        ids = [e.id for e in self.replay.in_stage(Stage.RUNNING)]
        if ids:
            self.replay.push(meta_of(data.draw(st.sampled_from(ids)), 0), b"1234", self.published, 0.0)

    @rule(data=st.data(), filtered=st.booleans())
    def leave_untrained(self, data: st.DataObject, filtered: bool) -> None:
        ids = [e.id for e in self.replay.entries.values() if e.stage is not Stage.SERVED]
        if ids:
            group_id = data.draw(st.sampled_from(ids))
            self.replay.filter(group_id, "dull") if filtered else self.replay.drop(group_id, "failed")

    @rule(actor=st.sampled_from(ACTORS))
    def die(self, actor: str) -> None:
        for group_id in self.running(actor):
            self.replay.requeue(group_id)

    @rule(actor=st.sampled_from(ACTORS))
    def apply_weights(self, actor: str) -> None:
        self.held[actor] = self.published

    @precondition(lambda self: not self.serving)
    @rule()
    def serve(self) -> None:
        entries = self.replay.serve(self.batches)
        if entries:
            version = self.bound.batch_version(self.batches)
            assert len(entries) == self.bound.groups_per_batch
            for entry in entries:
                assert version - entry.meta["oldest"] <= self.bound.max_staleness, "the bound was broken"
            self.serving = [entry.id for entry in entries]
            self.trained_slots += [entry.slot for entry in entries]

    @precondition(lambda self: self.serving)
    @rule()
    def train(self) -> None:
        assert self.replay.finish(self.batches) == len(self.serving)
        self.trained_ids += self.serving
        self.serving = []
        self.batches += 1
        self.published = self.bound.batch_version(self.batches)

    @invariant()
    def ledger_balances(self) -> None:
        if hasattr(self, "replay"):
            ledger = self.replay.ledger()
            gone = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
            assert ledger["admitted"] == gone + ledger["active"]
            assert self.replay.bytes == sum(len(e.payload) for e in self.replay.entries.values())

    @invariant()
    def trained_once_and_in_order(self) -> None:
        if hasattr(self, "replay"):
            assert len(set(self.trained_ids)) == len(self.trained_ids)
            assert self.trained_slots == sorted(self.trained_slots) == list(range(len(self.trained_slots)))

    def teardown(self) -> None:
        """Progress: if everybody goes on honestly, the next batch can always be completed."""
        if not hasattr(self, "replay"):
            return
        if self.serving:
            self.train()
        for actor in ACTORS:
            self.apply_weights(actor)
        for _ in range(200):
            self.admit("a", 4)
            for actor in ACTORS:
                for group_id in self.running(actor):
                    self.replay.push(meta_of(group_id, self.published), b"1234", self.published, 0.0)
            if self.replay.serve(self.batches):
                return
        pytest.fail("the buffer is stuck")


TestBufferHistory = BufferHistory.TestCase
TestBufferHistory.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
