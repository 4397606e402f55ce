"""Real sockets, the real controller, and a hostile or faulty peer: the others are not affected.

Two actors and a learner make five batches, once undisturbed and once for each attack in their midst. The batches (which
groups, in which order, with which bytes), the learner's messages about weights, and the ledger are equal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from areal_like.wire import messages
from areal_like.wire.bus import Dealer, Router
from areal_like.wire.frames import MAX_FRAMES
from tests.buffer.house import SIGN_OF_LIFE, B, House, asynchronous, framed, group, table

BATCHES, ATTACKED = 5, 2
"""Batches in all; how many are trained when the attack comes."""
TURNS = 20_000
"""Turns of everybody until a run counts as stuck; it takes a few hundred."""


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

    def recorded(self, kind: str) -> list[list[Any]]:
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
                        head, payload = group(lease.group_id, self.version)
                        self.send(framed("push", table(head), bytes(payload)))
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
        self.server = House(asynchronous(max_staleness=1), router=self.router, timeout=60.0).server
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
        self.until(lambda: self.server.store.counts.admitted == (BATCHES + 2) * B and not self.server.store.slots.free)
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
    """The last message breaks off between two frames."""
    sock, random = run.stranger(), np.random.default_rng(0)
    for size in (0, 1, 2, 35, 1000, 100_000):
        sock.send_multipart([random.bytes(size)] * (1 + size % 3))
    sock.send_multipart([b"\x93\x02\xa4push" + b"\xdd\xff\xff\xff\xff" * 1000])
    sock.send_multipart([b"x"] * (MAX_FRAMES + 10))
    sock.send(b"x", zmq.SNDMORE)
    run.turn(10)
    sock.close(linger=0)


def old_messages(run: Run) -> None:
    """Earlier messages again, one after the other, from their senders and from a stranger. Each of the learner's alone
    would set the run back."""
    for peer, kinds in (
        *((actor, ("push", "hello", "applied", "heartbeat")) for actor in run.actors),
        (run.learner, ("hello", "published", "trained", "checkpointed", "want")),
    ):
        for kind in kinds:
            for frames in peer.recorded(kind)[: None if kind == "push" else 1]:
                peer.dealer.socket.send_multipart(frames)
                run.stranger().send_multipart(frames)
            run.turn(5)


def a_taken_name(run: Run) -> None:
    """The learner's on the level of the socket, and an actor's in a message."""
    for kind, body in (("trained", {"index": ATTACKED}), ("want", {"index": BATCHES, "version": BATCHES})):
        run.stranger(b"learner").send_multipart(framed(kind, body))
    sock, mine = run.stranger(), run.actors[0].dealer.socket.getsockopt(zmq.ROUTING_ID)
    sock.send_multipart(framed("hello", {"role": "actor", "name": "actor-0", "pid": 1, "slots": 8}))
    sock.send_multipart(framed("applied", {"version": 0, "digest": "d0"}))
    run.until(lambda: run.server.fleet.by_name["actor-0"].peer != mine)
    sock.close(linger=0)


def a_flood(run: Run) -> None:
    """Requests whose answers the peer never reads."""
    sock = run.stranger()
    for _ in range(20_000):
        sock.send_multipart(framed("status", {}))
        sock.send(b"rubbish")


@pytest.mark.parametrize("attack", [rubbish, old_messages, a_taken_name, a_flood], ids=lambda each: each.__name__)
def test_nothing_changes_for_the_others(run: Run, undisturbed: dict[str, Any], attack: Callable[[Run], None]) -> None:
    run.trained(ATTACKED)
    attack(run)
    assert run.result() == undisturbed
