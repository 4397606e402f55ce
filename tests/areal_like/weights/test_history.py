"""The core of publisher and subscriber without sockets: after any loss, damage, skip or restart, an actor that
reports a version holds its bits."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from areal_like.weights import history as history_module
from areal_like.weights.device import DeviceReplica
from areal_like.weights.history import History, Hop
from areal_like.weights.layout import Layout
from areal_like.weights.replica import NOTHING, Desync, Replica, Route
from areal_like.weights.state import State, TensorSpec
from tests.areal_like.weights.states import in_parts, message
from tests.seeds import seeded

SPECS = [
    TensorSpec("norm", "bfloat16", (24,)),
    TensorSpec("w", "bfloat16", (70, 81)),
    TensorSpec("v", "float32", (65, 64)),
]
BLOCK = 8192


class Learner:
    """Versions of weights that change on command, in several parts with a history each."""

    def __init__(self, keep: int = 4, snapshot_every: int = 20, seed: int = 0, parts: int = 1):
        self.rng, self.version = seeded(seed), 0
        self.layouts = [Layout(SPECS, BLOCK, part, parts, apart=True) for part in range(parts)]
        self.histories = [History(layout, keep=keep, snapshot_every=snapshot_every) for layout in self.layouts]
        self.history = self.histories[0]
        self.whole = State(SPECS, self.rng.integers(0, 256, State(SPECS).nbytes, dtype=np.uint8))
        self.states = in_parts(self.whole, parts, BLOCK)
        self.spares = [State(SPECS, part=part, parts=parts) for part in range(parts)]
        self.digests = {0: self.whole.digest()}
        for history, state in zip(self.histories, self.states, strict=True):
            history.add(0, state.digest(), state, None)

    def step(self, density: float) -> None:
        """Make the next version. As in a publication, it overwrites the state of the version before the last."""
        for _, bits in self.whole.tensors():
            bits[self.rng.random(bits.size) < density] ^= bits.dtype.type(self.rng.choice([1, 2, 0x8000, 0x7F80]))
        self.version += 1
        new = in_parts(self.whole, len(self.states), BLOCK)
        for part, (history, old, spare) in enumerate(zip(self.histories, self.states, self.spares, strict=True)):
            history.release(spare)
            spare.buffer[:] = new[part].buffer
            delta = message(old, spare, self.layouts[part], history.version, self.version)
            history.add(self.version, spare.digest(), spare, delta)
        self.digests[self.version] = self.whole.digest()
        self.states, self.spares = self.spares, self.states


class Actor:
    def __init__(self, parts: int = 1, replica: Callable[[], Replica] = Replica) -> None:
        self.replica, self.fetched, self.desyncs = replica(), 0, []
        self.replica.shape(SPECS, BLOCK, parts)

    def sync(self, learner: Learner, version: int, spoil=lambda hop, data: data) -> bool:
        """Go to a version; `spoil` may change what arrives, or lose it (None). Returns whether it worked."""
        routes = [self._fetched(part, history, version, spoil) for part, history in enumerate(learner.histories)]
        if None in routes:
            return False
        try:
            self.replica.take(routes, version, learner.digests[version])
        except Desync as error:
            self.desyncs.append(error.reason)
            return False
        return True

    def _fetched(self, part: int, history: History, version: int, spoil) -> Route | None:
        base_snapshot, messages = None, []
        for hop in history.plan(version, *self.replica.held(part)) or ():
            payload = history.payload(hop.base, hop.version)
            assert payload is not None and payload.nbytes == hop.nbytes
            data = spoil(hop, bytes(payload))
            if data is None:
                return None
            self.fetched += len(data)
            if hop.base == NOTHING:
                base_snapshot = hop.version
                self.replica.forget(part)
                self.replica.layouts[part].copy_in(np.frombuffer(data, np.uint8), 0, self.replica.state)
            else:
                messages.append(data)
        return Route(base_snapshot, messages) if messages or base_snapshot is not None else None

    def holds(self, learner: Learner) -> bool:
        replica = self.replica
        return replica.state.digest() == replica.digest == learner.digests[replica.version]


class Mishaps:
    """Changes what arrives, or loses it (None): flipped bytes, missing bytes, earlier messages."""

    def __init__(self, chance: np.random.Generator):
        self.chance, self.old = chance, []

    def __call__(self, hop: Hop, data: bytes) -> bytes | None:
        kind, at = self.chance.random(), self.chance.integers(len(data))
        if kind < 0.03:
            return None
        if hop.base == NOTHING:
            return data
        if kind < 0.06:
            return data[:at] + bytes([data[at] ^ 1 << self.chance.integers(8)]) + data[at + 1 :]
        if kind < 0.08:
            return data[:at]
        if kind < 0.10 and self.old:
            return self.old[self.chance.integers(len(self.old))]
        self.old = [*self.old[-20:], data]
        return data


@pytest.mark.parametrize(
    ("parts", "replica"), [(1, Replica), (3, Replica), (3, partial(DeviceReplica, torch.device("cpu")))]
)
def test_many_versions_with_every_mishap(parts: int, replica: Callable[[], Replica]) -> None:
    """Joins, restarts, sleep, losses, broken messages, bits that rot: after each acknowledged version the actor's bits
    are the learner's; at every other moment it reports the version that it holds, or none."""
    learner, chance = Learner(parts=parts), seeded(1)
    actors, acknowledged, spoil = [Actor(parts, replica) for _ in range(3)], 0, Mishaps(chance)
    for _ in range(160):
        learner.step(float(chance.choice([0.0, 0.0005, 0.01, 0.01, 0.1, 0.6])))
        for i, actor in enumerate(actors):
            event = chance.random()
            if event < 0.01:
                actor = actors[i] = Actor(parts, replica)
            elif event < 0.02 and actor.replica.version != NOTHING:
                actor.replica.state.buffer[chance.integers(actor.replica.state.nbytes)] ^= 1
                assert not actor.replica.sweep(), "a full sweep sees a bit that has changed by itself"
            elif event < 0.3:
                continue  # it sleeps
            if actor.sync(learner, learner.version, spoil):
                acknowledged += 1
                assert actor.replica.version == learner.version and actor.holds(learner)
            assert actor.replica.version == NOTHING or actor.holds(learner)
    assert acknowledged > 120 and {"broken delta", "wrong base"} <= {r for actor in actors for r in actor.desyncs}
    for actor in actors:
        assert actor.replica.version == learner.version or actor.sync(learner, learner.version)
        assert actor.holds(learner)


def test_a_plan_is_no_longer_than_a_message_may_be(monkeypatch) -> None:
    monkeypatch.setattr(history_module, "MOST_HOPS", 5)
    learner = Learner(keep=60)
    for _ in range(5):
        learner.step(0.0005)
    assert len(learner.history.plan(5, 1, learner.digests[1])) == 4
    assert learner.history.plan(5, 0, learner.digests[0])[0].base == NOTHING


def test_another_base_is_never_built_on() -> None:
    """Same version number, other bits: the plan is whole weights, and a delta applied by force is refused."""
    learner, other, actor = Learner(), Learner(seed=5), Actor()
    assert actor.sync(learner, 0)
    learner.step(0.01)
    other.step(0.01)
    delta = bytes(learner.history.payload(0, 1))
    assert other.history.plan(1, 0, actor.replica.digest)[0].base == NOTHING
    with pytest.raises(Desync, match="wrong base"):
        actor.replica.take([Route(None, [bytes(other.history.payload(0, 1))])], 1, other.digests[1])
    assert actor.sync(learner, 1) and actor.fetched > 2 * learner.whole.nbytes
    with pytest.raises(Desync, match="wrong base"):
        actor.replica.take([Route(None, [delta])], 1, learner.digests[1])  # a second time


def test_what_is_kept_stays_bounded() -> None:
    learner = Learner(keep=1000, snapshot_every=1000)
    assert Actor().sync(learner, 0)
    for _ in range(40):
        learner.step(0.5)
        kept = sum(hop.nbytes for hop, *_ in learner.history._chain.values())
        assert kept <= 2 * learner.whole.nbytes + 4096


def test_nothing_of_an_earlier_line_of_versions_is_left_when_another_begins() -> None:
    """A learner that starts again from a checkpoint uses the same numbers for other bits."""
    learner, actor, newcomer = Learner(keep=60), Actor(), Actor()
    assert actor.sync(learner, 0)
    for _ in range(6):
        learner.step(0.0005)
    learner.version, learner.digests[0] = 0, learner.whole.digest()
    assert learner.history.payload(3, 4) is not None
    learner.history.add(0, learner.digests[0], learner.states[0], None)
    assert learner.history.payload(3, 4) is None
    assert newcomer.sync(learner, 0) and newcomer.holds(learner)
    for _ in range(6):
        learner.step(0.0005)
    assert newcomer.sync(learner, 6) and newcomer.holds(learner)
    assert actor.sync(learner, 6) and actor.holds(learner), "from the earlier line it gets whole weights"
