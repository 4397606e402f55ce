"""The core of publisher and subscriber without sockets: whatever is lost, broken, skipped or restarted, who holds a
version holds its bits."""

import numpy as np
import pytest

from areal_like.weights.codec import Encoder, Lanes
from areal_like.weights.delta import Head, write
from areal_like.weights.digest import text_of
from areal_like.weights.history import History, Part
from areal_like.weights.layout import Layout
from areal_like.weights.planes import pack
from areal_like.weights.replica import NOTHING, Desync, Replica
from areal_like.weights.state import State, TensorSpec

SPECS = [
    TensorSpec("norm", "bfloat16", (24,)),
    TensorSpec("w", "bfloat16", (70, 81)),
    TensorSpec("v", "float32", (65, 64)),
]
LAYOUT = Layout(SPECS, 8192)


class Learner:
    """Versions of weights that change as told, in a history."""

    def __init__(self, keep: int = 4, anchor_every: int = 20, mode: str = "ulp", seed: int = 0):
        self.rng, self.mode, self.version = np.random.default_rng(seed), mode, 0
        self.history = History(LAYOUT, keep=keep, anchor_every=anchor_every)
        self.state = State(SPECS, self.rng.integers(0, 256, State(SPECS).nbytes, dtype=np.uint8))
        self.lanes, self.encoder = Lanes(LAYOUT, self.state.words), Encoder(LAYOUT, mode)
        self.digests = {0: self.state.digest()}
        self.history.add(0, self.digests[0], self.state, None)
        self._spare = State(SPECS)

    def step(self, density: float) -> None:
        """The next version. As in a publication, the state of the version before the last is written over."""
        self.history.release(self._spare)
        new = self._spare
        new.buffer[:] = self.state.buffer
        for _, bits in new.tensors():
            bits[self.rng.random(bits.size) < density] ^= bits.dtype.type(self.rng.choice([1, 2, 0x8000, 0x7F80]))
        blocks = [pack(self.encoder.encode(b, self.state.buffer, new.buffer, self.lanes)) for b in LAYOUT.blocks]
        digest = text_of(self.lanes.total(), new.words.size)
        head = Head(self.version, self.version + 1, self.digests[self.version], digest, self.mode)
        self.version += 1
        self.digests[self.version] = digest
        self.history.add(self.version, digest, new, write(head, LAYOUT, blocks))
        self.state, self._spare = new, self.state


class Actor:
    def __init__(self) -> None:
        self.replica, self.fetched, self.desyncs = Replica(), 0, []
        self.replica.shape(SPECS, 8192)

    def sync(self, learner: Learner, version: int, spoil=lambda part, data: data) -> bool:
        """Go to a version; `spoil` may change what arrives, or lose it (None). Did it work?"""
        replica = self.replica
        parts = learner.history.plan(version, replica.version, replica.digest)
        if not parts:
            return False
        anchor, messages = None, []
        for part in parts:
            payload = learner.history.payload(part.base, part.version)
            assert payload is not None and payload.nbytes == part.nbytes
            data = spoil(part, bytes(payload))
            if data is None:
                return False
            self.fetched += len(data)
            if part.base == NOTHING:
                anchor = part.version
                replica.forget()
                replica.state.buffer[:] = np.frombuffer(data, np.uint8)
            else:
                messages.append(data)
        try:
            replica.take(anchor, messages, version, learner.digests[version])
        except Desync as error:
            self.desyncs.append(error.reason)
            return False
        return True


def holds(actor: Actor, learner: Learner) -> bool:
    replica = actor.replica
    return replica.state.digest() == replica.digest == learner.digests[replica.version]


class Mishaps:
    """Changes what arrives, or loses it (None): flipped and missing bytes, messages of before."""

    def __init__(self, chance: np.random.Generator):
        self.chance, self.old = chance, []

    def __call__(self, part: Part, data: bytes) -> bytes | None:
        kind = self.chance.random()
        if kind < 0.03:
            return None
        if part.base == NOTHING:
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
    """The actor after what may happen to it; None: asleep, or busy."""
    event = chance.random()
    if event < 0.01:
        return Actor()
    if event < 0.02 and actor.replica.version != NOTHING:
        actor.replica.state.buffer[chance.integers(actor.replica.state.nbytes)] ^= 1
        assert not actor.replica.sweep(), "a full sweep sees a bit that has changed by itself"
    return actor if event < 0.02 or event > 0.3 else None


@pytest.mark.parametrize("mode", ["ulp", "absolute"])
def test_a_thousand_versions_with_every_mishap(mode: str) -> None:
    """Joins, restarts, sleep, losses, broken messages, bits that rot: after each acknowledged version the actor's bits
    are the learner's, and at every other moment it knows that it holds nothing, or what."""
    learner, chance = Learner(mode=mode), np.random.default_rng(1)
    actors, acknowledged, spoil = [Actor() for _ in range(3)], 0, Mishaps(chance)
    reasons: set[str] = set()
    for _ in range(1000):
        learner.step(float(chance.choice([0.0, 0.0005, 0.01, 0.01, 0.1, 0.6])))
        for i, actor in enumerate(actors):
            awake = disturbed(actor, chance)
            if awake is None:
                continue
            actors[i] = awake
            if awake.sync(learner, learner.version, spoil):
                acknowledged += 1
                assert awake.replica.version == learner.version and holds(awake, learner)
            assert awake.replica.version == NOTHING or holds(awake, learner)
            reasons |= set(awake.desyncs)
    assert acknowledged > 1500 and {"broken delta", "wrong base"} <= reasons
    for actor in actors:
        assert actor.replica.version == learner.version or actor.sync(learner, learner.version)
        assert holds(actor, learner)


def test_fifty_versions_asleep() -> None:
    """A few bytes where the deltas are there, in one merged message; else an anchor, and from there as everybody."""
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
    (part,) = learner.history.plan(50, 0, learner.digests[0])
    assert (part.base, part.version) == (0, 50) and part.nbytes < 0.8 * chain
    assert actor.sync(learner, 50) and holds(actor, learner) and actor.fetched - before == part.nbytes
    short = Learner(keep=4, anchor_every=20)
    assert late.replica.digest == short.digests[0]
    for _ in range(50):
        short.step(0.01)
    parts = short.history.plan(50, 0, short.digests[0])
    assert parts[0].base == NOTHING
    assert late.sync(short, 50) and holds(late, short)


def test_late_joiners_share_an_anchor_until_it_is_old() -> None:
    learner = Learner(keep=2, anchor_every=10)
    plans = []
    for _ in range(24):
        learner.step(0.0005)
        newcomer = Actor()
        plans.append([part.base for part in learner.history.plan(learner.version, NOTHING, "")])
        assert newcomer.sync(learner, learner.version) and holds(newcomer, learner)
    starts = [i for i, plan in enumerate(plans) if plan == [NOTHING]]
    assert starts == [0, 10, 20] and all(plan[0] == NOTHING for plan in plans)


def test_the_version_before_the_newest_can_still_be_had() -> None:
    """Actors may be told of a version later than the learner goes on (injected ages)."""
    learner, newcomer, follower = Learner(), Actor(), Actor()
    learner.step(0.01)
    assert follower.sync(learner, 1)
    learner.step(0.01)
    learner.step(0.01)
    assert newcomer.sync(learner, 2) and holds(newcomer, learner) and newcomer.replica.version == 2
    assert follower.sync(learner, 2) and follower.replica.version == 2
    assert follower.sync(learner, 3) and holds(follower, learner)
    assert Learner().history.plan(7, NOTHING, "") is None, "still to come"


def test_another_base_is_never_built_on() -> None:
    """Same version number, other bits: the plan is whole weights; and a delta that is forced on is refused."""
    learner, actor = Learner(), Actor()
    assert actor.sync(learner, 0)
    learner.step(0.01)
    delta = bytes(learner.history.payload(0, 1))
    other = Learner(seed=5)
    other.step(0.01)
    assert other.history.plan(1, 0, actor.replica.digest)[0].base == NOTHING
    with pytest.raises(Desync, match="wrong base"):
        actor.replica.take(None, [bytes(other.history.payload(0, 1))], 1, other.digests[1])
    assert actor.replica.version == NOTHING
    assert actor.sync(learner, 1) and actor.fetched > 2 * learner.state.nbytes
    with pytest.raises(Desync, match="wrong base"):
        actor.replica.take(None, [delta], 1, learner.digests[1])  # a second time


def test_bits_that_are_not_what_the_head_says_are_noticed() -> None:
    learner, actor = Learner(), Actor()
    assert actor.sync(learner, 0)
    actor.replica.state.buffer[100] ^= 4  # nobody noticed
    learner.step(0.01)
    with pytest.raises(Desync, match="wrong digest"):
        replica = actor.replica
        replica._lanes = Lanes(LAYOUT, replica.state.words)
        replica.take(None, [bytes(learner.history.payload(0, 1))], 1, learner.digests[1])
    assert actor.replica.version == NOTHING


def test_what_is_kept_stays_bounded() -> None:
    learner = Learner(keep=1000, anchor_every=1000)
    assert Actor().sync(learner, 0)
    for _ in range(40):
        learner.step(0.5)
        kept = sum(part.nbytes for part, _ in learner.history._chain.values())
        assert kept <= 2 * learner.state.nbytes + 4096
