"""A controller with actors and a learner that the test plays: the socket is a fake, everything else is real."""

from collections import deque
from functools import partial

import msgspec
import numpy as np

from areal_like.tasks.heldout import HeldoutSet
from areal_like.types import Group, Sample
from areal_like.wire.frames import SCHEMA, Received, WireError, decode
from areal_like.wire.groups import Head, encode_group, pack_heads
from areal_like.wire.messages import Message, Refused
from buffer.dispatch import Dispatcher
from buffer.evaluation import Evaluation
from buffer.groups import GroupManager
from buffer.outbox import Outbox
from buffer.peers import Peers
from buffer.policies import in_order
from buffer.prompts import PromptCursor
from buffer.schedulers import AsyncScheduler
from buffer.server import Server
from buffer.sizing import Fixed
from buffer.staleness import Bound

B = 4


class FakeRouter:
    def __init__(self) -> None:
        self.incoming: deque = deque()
        self.sent: list[tuple[str, str, dict]] = []
        self.refused = 0
        self.endpoint = "tcp://127.0.0.1:1"

    def receive(self, timeout: float):
        return self.incoming.popleft() if self.incoming else None

    def send(self, peer: bytes, message: Message, payloads: object = ()) -> None:
        self.sent.append((peer.decode(), message.kind(), msgspec.to_builtins(message, builtin_types=(bytes,))))

    def refuse(self, peer: bytes, reason: str) -> None:
        self.refused += 1
        self.send(peer, Refused(reason))


def group(group_id: int, version: int, samples: int = 8, reward: float = 1.0) -> tuple[Head, bytes]:
    sample = Sample(np.zeros(3, np.int32), 1, np.zeros(2, np.float32), np.ones(2, bool), [(version, 2)], reward, "stop")
    return encode_group(Group(group_id, [sample] * samples, {version: f"d{version}"}))


def answer(lease: int, reward: float, version: int = 0) -> tuple[dict, bytes]:
    """The body and the payload of a held-out result."""
    head, payload = group(lease, version, samples=1, reward=reward)
    facts = {"id": lease, "reward": reward, "oldest": version, "newest": version, "length": 2}
    return facts | {"answer": pack_heads([head])}, bytes(payload)


def table(*heads: Head) -> dict:
    """The body of a push."""
    return {"table": pack_heads(heads)}


def framed(kind: str, body: dict, *payloads: bytes) -> list[bytes]:
    """The frames of data that may not be a message."""
    return [msgspec.msgpack.encode([SCHEMA, kind, body]), *payloads]


def said(kind: str, body: dict, *payloads: bytes) -> Received:
    """Decode a message from its bytes. Raises WireError."""
    return decode(framed(kind, body, *payloads))


def heldout_set(name: str, prompts: int, samples: int = 1, every: int = 0, ks=(1,), own: bool = True) -> HeldoutSet:
    rows = [(name, row) for row in range(prompts)]
    return HeldoutSet(name, None, rows, samples, float(samples > 1), every, ks, 1.0, {}, own)


SIGN_OF_LIFE = {"stats": {}, "progress": {}, "heldout": {}}


class House:
    """A controller, two actors and a learner; the test plays the last two."""

    def __init__(
        self,
        scheduler,
        *,
        actors: int = 2,
        evaluate: int = 0,
        interval: int = 1,
        timeout: float = 1e9,
        last_batch: int | None = None,
        rows: int = 1000,
        lease_timeout: float = 0.0,
        **rules,
    ):
        self.router = rules.pop("router", None) or FakeRouter()
        bound = Bound(scheduler.max_staleness, B, interval)
        dispatcher = Dispatcher(
            Peers(self.router, actors),
            GroupManager(bound, **{"batch_policy": partial(in_order), **rules}),
            Outbox(self.router, None),
            scheduler,
            PromptCursor(rows, seed=0),
            Evaluation([heldout_set("heldout", evaluate, every=2)] if evaluate else []),
            max_bytes=1 << 30,
            last_batch=last_batch,
        )
        self.server = Server(dispatcher, heartbeat_timeout=timeout, lease_timeout=lease_timeout)
        self.store = self.server.store
        self.names = [f"actor-{i}" for i in range(actors)]
        self.slots = 256

    def has_been_silent(self, name: str, seconds: float = 2e9) -> None:
        """An actor has sent nothing for so much longer."""
        self.server.fleet.by_name[name].seen -= seconds

    def say(self, who: str, kind: str, body: dict, *payloads: bytes) -> None:
        try:
            self.router.incoming.append((who.encode(), said(kind, body, *payloads)))
        except WireError as error:
            self.router.refuse(who.encode(), str(error))
        self.server.step(0)

    def hello(self, *names: str, slots: int | None = None) -> None:
        for name in names:
            role = "learner" if name == "learner" else "actor"
            self.say(name, "hello", {"role": role, "name": name, "pid": 1, "slots": slots or self.slots})

    def publish(self, version: int) -> None:
        self.say("learner", "published", {"manifest": {"version": version, "digest": f"d{version}"}})

    def apply(self, version: int, *names: str) -> None:
        for name in names or self.names:
            self.say(name, "applied", {"version": version, "digest": f"d{version}"})

    def start(self) -> "House":
        self.hello("learner", *self.names)
        self.publish(0)
        self.apply(0)
        return self

    def want(self, index: int) -> None:
        """The learner asks for a batch; each step makes a version."""
        self.say("learner", "want", {"index": index, "version": index})

    def trained(self, index: int) -> None:
        """The learner has trained a batch, and all actors take its version."""
        self.say("learner", "trained", {"index": index})
        self.publish(index + 1)
        self.apply(index + 1)

    def leases(self, name: str = "", split: str = "train") -> list[int]:
        sent = [(who, body) for who, kind, body in self.router.sent if kind == "lease" and (not name or who == name)]
        return [row[0] for _, body in sent for row in body["leases"] if row[2] == split]

    def rows(self) -> dict[int, int]:
        """The row of each group that was leased."""
        sent = [body for _, kind, body in self.router.sent if kind == "lease"]
        return {lease[0]: lease[1] for body in sent for lease in body["leases"] if lease[2] == "train"}

    def push(self, name: str, group_id: int, version: int) -> None:
        head, payload = group(group_id, version)
        self.say(name, "push", table(head), payload)

    def finish(self, group_id: int, version: int) -> None:
        """Push a group from the actor that has its lease."""
        self.push(self.server.store.entries[group_id].actor, group_id, version)

    def evaluate(self, reward: float, version: int) -> None:
        """Answer all held-out leases so far, each from the actor that has it."""
        for name in self.names:
            for lease in self.leases(name, "heldout"):
                self.say(name, "evaluated", *answer(lease, reward, version))

    def batches(self) -> list[list[int]]:
        return [[name[0] for name in body["table"]["groups"]] for _, kind, body in self.router.sent if kind == "batch"]


def asynchronous(**knobs) -> AsyncScheduler:
    return AsyncScheduler(Fixed(group_size=8), **knobs)
