"""Real sockets, the real controller, and a hostile or faulty peer: the others are not affected.

Two actors and a learner make five batches, once undisturbed and once for each attack in their midst. The batches (which
groups, in which order, with which bytes), the learner's messages about weights, and the ledger are equal.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from areal_like.types import Group, Sample
from areal_like.wire import messages
from areal_like.wire.bus import Dealer, Router
from areal_like.wire.frames import MAX_FRAMES, SCHEMA
from areal_like.wire.groups import encode_group
from buffer.dispatch import Dispatcher
from buffer.evaluation import Evaluation
from buffer.groups import GroupManager
from buffer.outbox import Outbox
from buffer.peers import Peers
from buffer.policies import in_order
from buffer.prompts import PromptCursor
from buffer.server import Server
from buffer.staleness import Bound
from buffer.store import LEASED
from tests.buffer.house import SIGN_OF_LIFE, asynchronous, framed, table

B, BATCHES, ATTACKED = 4, 5, 2
"""Groups per batch; batches in all; how many are trained when the attack comes."""
TURNS = 20_000
"""Turns of everybody until a run counts as stuck; it takes a few hundred."""


def push_frames(group_id: int, version: int, token: int) -> list[Any]:
    """A push of one group whose tokens name the actor that made it."""
    mask = np.ones(2, bool)
    sample = Sample(np.full(3, token, np.int32), 1, np.zeros(2, np.float32), mask, [(version, 2)], 1.0, "stop")
    head, payload = encode_group(Group(group_id, [sample] * 8, {version: f"d{version}"}))
    return framed("push", table(head), bytes(payload))


class Peer:
    """A dealer of the run that records its messages, so that they can be sent again."""

    def __init__(self, run: Run, name: str):
        self.name, self.run, self.said = name, run, []  # type: ignore[var-annotated]
        self.dealer = Dealer(run.router.endpoint, name, peer="buffer")
        self.version = -1
        self.hello()

    def hello(self) -> None:
        role = "learner" if self.name == "learner" else "actor"
        self.say("hello", role=role, name=self.name, pid=os.getpid(), slots=256)

    def say(self, kind: str, **body: Any) -> None:
        self.send(framed(kind, body))

    def send(self, frames: list[Any]) -> None:
        self.said.append(frames)
        self.dealer.socket.send_multipart(frames)

    def again(self, kind: str) -> list[list[Any]]:
        """Send again all recorded messages of `kind`."""
        return [frames for frames in self.said if msgpack.unpackb(frames[0], strict_map_key=False)[1] == kind]


class ScriptedActor(Peer):
    """Pushes a group for each lease at once."""

    def turn(self) -> None:
        self.say("heartbeat", **SIGN_OF_LIFE)
        while received := self.dealer.receive(0):
            match received.message:
                case messages.Announce(manifest):
                    self.version = manifest.version
                    self.say("applied", version=self.version, digest=manifest.digest)
                case messages.Lease(leases):
                    for lease in leases:
                        self.send(push_frames(lease.group_id, self.version, token=lease.group_id))
                        self.run.leased.append(lease.group_id)
                case messages.Refused(reason) if "say hello" in reason:
                    self.hello()
                    self.say("applied", version=self.version, digest=f"d{self.version}")


class ScriptedLearner(Peer):
    """Trains the batches that it gets, `BATCHES` times."""

    def __init__(self, run: Run, name: str):
        super().__init__(run, name)
        self.batches: list[Any] = []
        self.publish(0)

    def publish(self, version: int) -> None:
        self.say("published", manifest={"version": version, "digest": f"d{version}"})
        if version < BATCHES:
            self.say("want", index=version, version=version)

    def turn(self) -> None:
        while received := self.dealer.receive(0):
            if isinstance(batch := received.message, messages.Batch):
                self.batches.append((batch.index, [bytes(payload) for payload in received.payloads]))
                self.say("trained", index=batch.index)
                self.say("checkpointed", step=batch.index + 1)
                self.publish(batch.index + 1)


class Run:
    """All peers in one thread, in turns."""

    def __init__(self) -> None:
        self.router = Router("tcp://127.0.0.1:0")
        dispatcher = Dispatcher(
            Peers(self.router, 2),
            GroupManager(Bound(1, B, 1), partial(in_order)),
            Outbox(self.router, None),
            asynchronous(max_staleness=1),
            PromptCursor(1000, seed=0),
            Evaluation([]),
            max_bytes=1 << 30,
        )
        self.server = Server(dispatcher, heartbeat_timeout=60.0)
        self.leased: list[int] = []
        self.actors = [ScriptedActor(self, f"actor-{number}") for number in range(2)]
        self.learner = ScriptedLearner(self, "learner")
        self.strangers: list[zmq.Socket] = []

    def stranger(self, routing_id: bytes = b"") -> zmq.Socket:
        sock = zmq.Context.instance().socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 1000)
        if routing_id:
            sock.setsockopt(zmq.ROUTING_ID, routing_id)
        sock.connect(self.router.endpoint)
        self.strangers.append(sock)
        return sock

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.server.step(0.001)
            for peer in (*self.actors, self.learner):
                peer.turn()

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(TURNS):
            if done():
                return
            self.turn()
        raise AssertionError(f"stuck: {self.server.store.ledger()}, {len(self.learner.batches)} batches")

    def trained(self, batches: int) -> None:
        self.until(lambda: self.server.learner.steps >= batches)

    def result(self) -> dict[str, Any]:
        """The state after the last batch, once every group that may start has been pushed."""
        self.trained(BATCHES)
        self.until(lambda: self.server.store.admitted == (BATCHES + 2) * B and not self.server.store.slots.free)
        self.until(lambda: all(entry.payload for entry in self.server.store.entries.values()))
        return {
            "batches": self.learner.batches,
            "ledger": self.server.store.ledger(),
            "version": self.server.weights.version,
            "evaluations": self.server.gauges.evaluations,
            "staleness": self.server.store.staleness_max,
        }

    def close(self) -> None:
        for sock in self.strangers:
            sock.close(linger=0)
        for peer in (*self.actors, self.learner):
            peer.dealer.close()
        self.router.close()


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    made = Run()
    result = made.result()
    made.close()
    return result


# ---- attacks: each may take turns of the run, and leaves what it has opened to the run ------------------------------


def rubbish(run: Run) -> None:
    sock, random = run.stranger(), np.random.default_rng(0)
    for size in (0, 1, 2, 35, 1000, 100_000):
        sock.send_multipart([random.bytes(size)] * (1 + size % 3))
    sock.send_multipart([b"\x93\x02\xa4push" + b"\xdd\xff\xff\xff\xff" * 1000])
    sock.send_multipart([b"x"] * (MAX_FRAMES + 10))


def other_schemas(run: Run) -> None:
    sock = run.stranger()
    hello = {"role": "actor", "name": "actor-0", "pid": 1, "slots": 8}
    for schema in (SCHEMA - 1, SCHEMA + 1, 127):
        sock.send(msgpack.packb([schema, "hello", hello]))
    answers: list[str] = []
    while len(answers) < 3:
        run.turn()
        if sock.poll(0):
            answers.append(msgpack.unpackb(sock.recv())[2]["reason"])
    for schema, answer in zip((SCHEMA - 1, SCHEMA + 1), answers[:2], strict=True):
        assert f"schema: got {schema}, expected {SCHEMA}" in answer


def a_connection_that_is_no_zeromq(run: Run) -> None:
    host, port = run.router.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)


def half_a_message(run: Run) -> None:
    """ZeroMQ's greeting and handshake, the announcement of a frame, and nothing more."""
    host, port = run.router.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 1 + 31))
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        raw.sendall(bytes([4, len(ready)]) + ready)
        raw.sendall(b"\x02" + (1 << 20).to_bytes(8, "big") + b"half")
        run.turn(10)


def half_a_group(run: Run) -> None:
    """Pushes with a payload that is short, missing, or too many, and one that breaks off between two frames."""
    sock = run.stranger()
    newest = max(run.leased)
    header, payload = push_frames(newest, run.server.weights.version, token=99)
    for frames in ([header], [header, payload[:-1]], [header, payload, payload], [header, b""]):
        sock.send_multipart(frames)
    sock.send(header, zmq.SNDMORE)
    run.turn(10)
    sock.close(linger=0)


def an_old_push_of_an_actor(run: Run) -> None:
    for actor in run.actors:
        for frames in actor.again("push"):
            actor.dealer.socket.send_multipart(frames)
            run.stranger().send_multipart(frames)


def another_push_of_groups_that_are_trained(run: Run) -> None:
    sock = run.stranger()
    for group_id in range(ATTACKED * B):
        sock.send_multipart(push_frames(group_id, 0, token=99))


def pushes_of_groups_that_others_have_and_nobody_has(run: Run) -> None:
    """They come before the owners' pushes: all of it is valid, but the sender has had no lease."""
    thief = run.stranger()
    thief.send_multipart(framed("hello", {"role": "actor", "name": "thief", "pid": 1, "slots": 8}))
    while "thief" not in run.server.fleet.by_name:
        run.server.step(0.001)
    while not run.server.store.count(*LEASED):
        for each in (run.learner, *run.actors):  # all: without new weights nothing more may start
            each.turn()
        run.server.step(0.001)
    stolen = sorted(entry.id for entry in run.server.store.of(*LEASED))
    for group_id in (*stolen, 500, 10**9, 2**60):
        thief.send_multipart(push_frames(group_id, run.server.weights.version, token=99))
    for _ in range(200):
        run.server.step(0.001)
    assert {entry.id for entry in run.server.store.of(*LEASED)} >= set(stolen)
    run.server.remove_actor(run.server.fleet.by_name["thief"])


def pushes_of_weights_that_were_never_published(run: Run) -> None:
    sock = run.stranger()
    for group_id in range(max(run.leased) + 1):
        sock.send_multipart(push_frames(group_id, 70, token=99))


def old_words_of_an_actor(run: Run) -> None:
    for actor in run.actors:
        for kind in ("hello", "applied", "heartbeat"):
            for frames in actor.again(kind):
                actor.dealer.socket.send_multipart(frames)


def old_words_of_the_learner(run: Run) -> None:
    """The learner's earlier messages, one after the other: each alone would set the run back."""
    for kind in ("hello", "published", "trained", "checkpointed", "want"):
        frames = run.learner.again(kind)[0]
        run.learner.dealer.socket.send_multipart(frames)
        run.stranger().send_multipart(frames)
        run.turn(5)


def words_that_only_the_learner_may_say(run: Run) -> None:
    sock = run.stranger(b"learner")
    for kind, body in (
        ("end_run", {"reason": "", "steps": ATTACKED}),
        ("published", {"manifest": {"version": 50, "digest": "x"}}),
        ("trained", {"index": ATTACKED}),
        ("want", {"index": BATCHES, "version": BATCHES}),
    ):
        sock.send_multipart(framed(kind, body))


def a_second_learner(run: Run) -> None:
    run.stranger().send_multipart(framed("hello", {"role": "learner", "name": "learner", "pid": 1, "slots": 0}))


def an_actor_that_takes_a_name_and_vanishes(run: Run) -> None:
    sock = run.stranger()
    sock.send_multipart(framed("hello", {"role": "actor", "name": "actor-0", "pid": 1, "slots": 8}))
    sock.send_multipart(framed("applied", {"version": 0, "digest": "d0"}))
    run.until(
        lambda: run.server.fleet.by_name["actor-0"].peer != run.actors[0].dealer.socket.getsockopt(zmq.ROUTING_ID)
    )
    sock.close(linger=0)


def many_hellos_of_one_connection(run: Run) -> None:
    sock = run.stranger()
    for number in range(1000):
        sock.send_multipart(framed("hello", {"role": "actor", "name": f"x{number}", "pid": 1, "slots": 8}))
    run.until(lambda: "x0" in run.server.fleet.by_name)
    run.turn(10)
    assert len(run.server.fleet) == 3, "a connection is one actor"
    sock.close(linger=0)
    run.server.remove_actor(run.server.fleet.by_name["x0"])  # as after the heartbeat's time-out


def applied_versions_that_do_not_exist(run: Run) -> None:
    """An actor that claims future weights could otherwise go beyond the bound."""
    run.actors[0].dealer.send(messages.Applied(1000, "x"))
    run.turn(10)
    assert run.server.fleet.by_name["actor-0"].version < 1000


def numbers_that_are_no_numbers(run: Run) -> None:
    sock = run.stranger()
    run.actors[0].dealer.send(messages.Heartbeat({"wall_seconds": float("nan")}, {}, {}))
    for body in (
        {"role": "actor", "name": "x", "pid": 1, "slots": 2**63},
        {"role": "actor", "name": "x\n" * 40, "pid": 1, "slots": 1},
        {"role": "god", "name": "x", "pid": 1, "slots": 1},
    ):
        sock.send_multipart(framed("hello", body))
    sock.send_multipart(framed("evaluated", {"id": 0, "reward": 9.0, "oldest": 0, "newest": 0, "length": 1}))


def a_flood(run: Run) -> None:
    """Requests whose answers the peer never reads."""
    sock = run.stranger()
    for _ in range(20_000):
        sock.send_multipart(framed("status", {}))
        sock.send(b"rubbish")


ATTACKS = [
    rubbish,
    other_schemas,
    a_connection_that_is_no_zeromq,
    half_a_message,
    half_a_group,
    an_old_push_of_an_actor,
    another_push_of_groups_that_are_trained,
    pushes_of_groups_that_others_have_and_nobody_has,
    pushes_of_weights_that_were_never_published,
    old_words_of_an_actor,
    old_words_of_the_learner,
    words_that_only_the_learner_may_say,
    a_second_learner,
    an_actor_that_takes_a_name_and_vanishes,
    many_hellos_of_one_connection,
    applied_versions_that_do_not_exist,
    numbers_that_are_no_numbers,
    a_flood,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_nothing_changes_for_the_others(run: Run, undisturbed: dict[str, Any], attack: Callable[[Run], None]) -> None:
    run.trained(ATTACKED)
    attack(run)
    assert run.result() == undisturbed


def test_the_comparison_would_see_a_change(run: Run, undisturbed: dict[str, Any]) -> None:
    run.trained(ATTACKED)
    run.server.groups.drop(next(entry.id for entry in run.server.store.entries.values()), "test")
    with pytest.raises(AssertionError):
        assert run.result() == undisturbed
