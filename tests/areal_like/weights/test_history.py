"""The core of publisher and subscriber without sockets: after any loss, damage, skip or restart, an actor that
reports a version holds its bits."""

import numpy as np
import pytest

from areal_like.weights import history as history_module
from areal_like.weights.codec import Encoder, Lanes
from areal_like.weights.delta import DeltaHead, write
from areal_like.weights.digest import text_of
from areal_like.weights.history import History, Hop
from areal_like.weights.layout import Layout
from areal_like.weights.planes import pack
from areal_like.weights.replica import NOTHING, Desync, Replica, Route
from areal_like.weights.state import State, TensorSpec
from tests.seeds import seeded

SPECS = [
    TensorSpec("norm", "bfloat16", (24,)),
    TensorSpec("w", "bfloat16", (70, 81)),
    TensorSpec("v", "float32", (65, 64)),
]
BLOCK = 8192


class Learner:
    """Versions of weights that change on command, in one history, or in several parts with a history each."""

    def __init__(self, keep: int = 4, snapshot_every: int = 20, seed: int = 0, parts: int = 1):
        self.rng, self.version = seeded(seed), 0
        self.layouts = [Layout(SPECS, BLOCK, part, parts, apart=True) for part in range(parts)]
        self.histories = [History(layout, keep=keep, snapshot_every=snapshot_every) for layout in self.layouts]
        self.whole = State(SPECS, self.rng.integers(0, 256, State(SPECS).nbytes, dtype=np.uint8))
        self.states, self._spares = ([State(SPECS, part=part, parts=parts) for part in range(parts)] for _ in range(2))
        self.digests = {0: self.whole.digest()}
        self._take_apart(self.states)
        self.lanes = [Lanes(layout, state.words) for layout, state in zip(self.layouts, self.states, strict=True)]
        self.encoders = [Encoder(layout) for layout in self.layouts]
        for history, state in zip(self.histories, self.states, strict=True):
            history.add(0, state.digest(), state, None)

    @property
    def history(self) -> History:
        (history,) = self.histories
        return history

    def _take_apart(self, states: list[State]) -> None:
        for part, state in enumerate(states):
            Layout(SPECS, BLOCK, part, len(states)).copy_out(self.whole.buffer, state.buffer)

    def step(self, density: float) -> None:
        """Make the next version. As in a publication, it overwrites the state of the version before the last."""
        for _, bits in self.whole.tensors():
            bits[self.rng.random(bits.size) < density] ^= bits.dtype.type(self.rng.choice([1, 2, 0x8000, 0x7F80]))
        for history, spare in zip(self.histories, self._spares, strict=True):
            history.release(spare)
        self._take_apart(self._spares)
        self.version += 1
        total = np.zeros(2, np.uint64)
        for part, (layout, history) in enumerate(zip(self.layouts, self.histories, strict=True)):
            lanes, old, new = self.lanes[part], self.states[part], self._spares[part]
            blocks = [pack(self.encoders[part].encode(b, old.buffer, new.buffer, lanes)) for b in layout.blocks]
            digest = text_of(lanes.total(), new.words.size)
            head = DeltaHead(history.version, self.version, history.digest, digest)
            history.add(self.version, digest, new, write(head, layout, blocks))
            total += lanes.total()
        self.digests[self.version] = text_of(total, self.whole.words.size)
        self.states, self._spares = self._spares, self.states


class Actor:
    def __init__(self, parts: int = 1) -> None:
        self.replica, self.fetched, self.desyncs = Replica(), 0, []
        self.replica.shape(SPECS, BLOCK, parts)

    def sync(self, learner: Learner, version: int, spoil=lambda hop, data: data) -> bool:
        """Go to a version; `spoil` may change what arrives, or lose it (None). Returns whether it worked."""
        routes = []
        for part, history in enumerate(learner.histories):
            route = self._fetched(part, history, version, spoil)
            if route is None:
                return False
            routes.append(route)
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
                self.replica.layouts[part].copy_in(np.frombuffer(data, np.uint8), 0, self.replica.state.buffer)
            else:
                messages.append(data)
        return Route(base_snapshot, messages) if messages or base_snapshot is not None else None


def holds(actor: Actor, learner: Learner) -> bool:
    replica = actor.replica
    return replica.state.digest() == replica.digest == learner.digests[replica.version]


class Mishaps:
    """Changes what arrives, or loses it (None): flipped bytes, missing bytes, earlier messages."""

    def __init__(self, chance: np.random.Generator):
        self.chance, self.old = chance, []

    def __call__(self, hop: Hop, data: bytes) -> bytes | None:
        kind = self.chance.random()
        if kind < 0.03:
            return None
        if hop.base == NOTHING:
            return data
        at = self.chance.integers(len(data))
        if kind < 0.06:
            return data[:at] + bytes([data[at] ^ 1 << self.chance.integers(8)]) + data[at + 1 :]
        if kind < 0.08:
            return data[:at]
        if kind < 0.10 and self.old:
            return self.old[self.chance.integers(len(self.old))]
        self.old = [*self.old[-20:], data]
        return data


def disturbed(actor: Actor, chance: np.random.Generator) -> Actor | None:
    """The actor after a mishap; None: it sleeps or is busy."""
    event = chance.random()
    if event < 0.01:
        return Actor(len(actor.replica.layouts))
    if event < 0.02 and actor.replica.version != NOTHING:
        actor.replica.state.buffer[chance.integers(actor.replica.state.nbytes)] ^= 1
        assert not actor.replica.sweep(), "a full sweep sees a bit that has changed by itself"
    return actor if event < 0.02 or event > 0.3 else None


@pytest.mark.parametrize("parts", [1, 3])
def test_hundreds_of_versions_with_every_mishap(parts: int) -> None:
    """Joins, restarts, sleep, losses, broken messages, bits that rot: after each acknowledged version the actor's bits
    are the learner's; at every other moment it reports the version that it holds, or none."""
    learner, chance = Learner(parts=parts), seeded(1)
    actors, acknowledged, spoil = [Actor(parts) for _ in range(3)], 0, Mishaps(chance)
    reasons: set[str] = set()
    for _ in range(250):
        learner.step(float(chance.choice([0.0, 0.0005, 0.01, 0.01, 0.1, 0.6])))
        for i, actor in enumerate(actors):
            awake = disturbed(actor, chance)
            if awake is None:
                continue
            actors[i] = awake
            if awake.sync(learner, learner.version, spoil):
                acknowledged += 1
                assert awake.replica.version == learner.version and holds(awake, learner)
                assert learner.digests[learner.version] == learner.whole.digest()
            assert awake.replica.version == NOTHING or holds(awake, learner)
            reasons |= set(awake.desyncs)
    assert acknowledged > 375 and {"broken delta", "wrong base"} <= reasons
    for actor in actors:
        assert actor.replica.version == learner.version or actor.sync(learner, learner.version)
        assert holds(actor, learner)


def test_fifty_versions_asleep() -> None:
    """A few bytes in one merged message if the deltas are still there; otherwise a base snapshot, and the same from
    there on."""
    learner = Learner(keep=60)
    actor, late = Actor(), Actor()
    assert actor.sync(learner, 0) and late.sync(learner, 0)
    chain = 0
    for _ in range(50):
        learner.step(0.0005)
        chain += sum(
            p.nbytes
            for p in learner.history.plan(learner.version, learner.version - 1, learner.digests[learner.version - 1])
        )
    before = actor.fetched
    (hop,) = learner.history.plan(50, 0, learner.digests[0])
    assert (hop.base, hop.version) == (0, 50) and hop.nbytes < 0.8 * chain
    assert actor.sync(learner, 50) and holds(actor, learner) and actor.fetched - before == hop.nbytes
    short = Learner(keep=4, snapshot_every=20)
    assert late.replica.digest == short.digests[0]
    for _ in range(50):
        short.step(0.01)
    hops = short.history.plan(50, 0, short.digests[0])
    assert hops[0].base == NOTHING
    assert late.sync(short, 50) and holds(late, short)


def test_another_base_is_never_built_on() -> None:
    """Same version number, other bits: the plan is whole weights, and a delta applied by force is refused."""
    learner, actor = Learner(), Actor()
    assert actor.sync(learner, 0)
    learner.step(0.01)
    delta = bytes(learner.history.payload(0, 1))
    other = Learner(seed=5)
    other.step(0.01)
    assert other.history.plan(1, 0, actor.replica.digest)[0].base == NOTHING
    with pytest.raises(Desync, match="wrong base"):
        actor.replica.take([Route(None, [bytes(other.history.payload(0, 1))])], 1, other.digests[1])
    assert actor.replica.version == NOTHING
    assert actor.sync(learner, 1) and actor.fetched > 2 * learner.whole.nbytes
    with pytest.raises(Desync, match="wrong base"):
        actor.replica.take([Route(None, [delta])], 1, learner.digests[1])  # a second time


def test_bits_that_are_not_what_the_head_says_are_noticed() -> None:
    learner, actor = Learner(), Actor()
    assert actor.sync(learner, 0)
    actor.replica.state.buffer[100] ^= 4  # nobody noticed
    learner.step(0.01)
    with pytest.raises(Desync, match="wrong digest"):
        replica = actor.replica
        replica._parts[0].lanes = Lanes(replica.layouts[0], replica.state.words)  # as they now are
        replica.take([Route(None, [bytes(learner.history.payload(0, 1))])], 1, learner.digests[1])
    assert actor.replica.version == NOTHING


def test_what_is_kept_stays_bounded() -> None:
    learner = Learner(keep=1000, snapshot_every=1000)
    assert Actor().sync(learner, 0)
    for _ in range(40):
        learner.step(0.5)
        kept = sum(hop.nbytes for hop, _ in learner.history._chain.values())
        assert kept <= 2 * learner.whole.nbytes + 4096


def asleep(monkeypatch, merge) -> tuple[Learner, Actor]:
    """An actor that is six versions behind, with deltas merged by `merge`."""
    monkeypatch.setattr(history_module, "merge", merge)
    monkeypatch.setattr(history_module, "BESIDE_FROM", 0)
    learner, actor = Learner(keep=60), Actor()
    assert actor.sync(learner, 0)
    for _ in range(6):
        learner.step(0.0005)
    return learner, actor


def test_nothing_of_an_earlier_line_of_versions_is_left_when_another_begins(monkeypatch) -> None:
    """A learner that starts again from a checkpoint uses the same numbers for other bits."""
    learner, actor = asleep(monkeypatch, history_module.merge)
    (merged,) = learner.history.plan(6, *actor.replica.held(0))
    assert learner.history.payload(merged.base, merged.version) is not None
    learner.version = 0
    learner.digests[0] = learner.states[0].digest()
    learner.history.add(0, learner.digests[0], learner.states[0], None)
    assert learner.history.payload(merged.base, merged.version) is None and learner.history.payload(3, 4) is None
    newcomer = Actor()
    assert newcomer.sync(learner, 0) and holds(newcomer, learner)
    for _ in range(6):
        learner.step(0.0005)
    assert newcomer.sync(learner, 6) and holds(newcomer, learner)
    assert actor.sync(learner, 6) and holds(actor, learner), "from the earlier line it gets whole weights"
