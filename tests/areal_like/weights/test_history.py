"""The core of publisher and subscriber without sockets: whatever is lost, broken, skipped or restarted, an actor that
reports a version holds its bits."""

import threading

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
    are the learner's; at every other moment it knows which version it holds, or that it holds none."""
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


def test_late_joiners_share_a_base_snapshot_until_it_is_old() -> None:
    learner = Learner(keep=2, snapshot_every=10)
    plans = []
    for _ in range(24):
        learner.step(0.0005)
        newcomer = Actor()
        plans.append([hop.base for hop in learner.history.plan(learner.version, NOTHING, "")])
        assert newcomer.sync(learner, learner.version) and holds(newcomer, learner)
        assert learner.history._digests.keys() == learner.history._chain.keys(), "others are forgotten"
    starts = [i for i, plan in enumerate(plans) if plan == [NOTHING]]
    assert starts == [0, 10, 20] and all(plan[0] == NOTHING for plan in plans)


def test_the_version_before_the_newest_can_still_be_had() -> None:
    """An actor may hear of a version after the learner has made the next one (injected ages)."""
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


def test_nobody_waits_while_deltas_are_merged(monkeypatch) -> None:
    may_end, ended, merge = threading.Event(), [], history_module.merge

    def slow(*args) -> bytes:
        ended.append(may_end.wait(timeout=20))
        return merge(*args)

    learner, actor = asleep(monkeypatch, slow)
    history = learner.history
    held = actor.replica.held(0)
    assert history.plan(6, *held, wait=False) is None
    learner.step(0.0005)
    assert history.payload(3, 4) and history.plan(7, 6, learner.digests[6], wait=False)
    assert history.plan(7, *held, wait=False) is None and not ended, "one at a time"
    may_end.set()
    (hop,) = history.plan(6, *held)
    assert (hop.base, hop.version) == (0, 6) and actor.sync(learner, 6) and holds(actor, learner)
    assert history.plan(7, *held, wait=True)[0].version == 7


def test_a_merged_delta_can_be_fetched_while_the_learner_goes_on(monkeypatch) -> None:
    """Otherwise an actor with a slow link would start again with each version; but not all deltas are kept forever."""
    learner, actor = asleep(monkeypatch, history_module.merge)
    history, held = learner.history, actor.replica.held(0)
    (hop,) = history.plan(6, *held)
    learner.step(0.0005)
    assert len(history.payload(hop.base, hop.version)) == hop.nbytes
    for version in range(8, 60):
        learner.step(0.05)
        history.plan(version, version - 5, learner.digests[version - 5])
        kept = [each[0].nbytes for each in history._merged.values()]
        assert sum(kept) <= learner.whole.nbytes // 2 or len(kept) == 1
    assert history.payload(hop.base, hop.version) is None


def test_a_merged_delta_that_is_longer_than_the_weights_is_not_asked_for_again(monkeypatch) -> None:
    """Otherwise it and the delta from the base snapshot push each other out of memory, and no plan is ever made."""
    merge, merged = history_module.merge, []

    def counted(*args) -> bytes:
        made = merge(*args) + bytes(learner.whole.nbytes)
        merged.append(len(made))
        if len(merged) > 2:
            pytest.fail("it would go on for ever")
        return made

    monkeypatch.setattr(history_module, "merge", counted)
    learner, actor = Learner(keep=60), Actor()
    learner.step(0.0005)
    assert actor.sync(learner, 1), "by a base snapshot"
    for part in (1, 2):  # all of the weights become others, then half of them: more than whole weights together
        new = learner.whole.buffer[: learner.whole.nbytes // part]
        new[:] = learner.rng.integers(0, 256, new.size)
        learner.step(0.0)
    assert [hop.base for hop in learner.history.plan(3, 0, learner.digests[0])] == [NOTHING]
    assert max(merged) > learner.whole.nbytes + history_module.HEADS
    assert actor.sync(learner, 3) and holds(actor, learner)


def test_deltas_of_another_line_of_versions_are_not_merged(monkeypatch) -> None:
    began, may_end, merge = threading.Event(), threading.Event(), history_module.merge

    def slow(*args) -> bytes:
        began.set()
        assert may_end.wait(timeout=20)
        return merge(*args)

    learner, actor = asleep(monkeypatch, slow)
    history, held = learner.history, actor.replica.held(0)
    assert history.plan(6, *held, wait=False) is None and began.wait(timeout=20)
    history.add(6, "0" * 32, learner.states[0], None)  # as a relay does after whole weights
    may_end.set()
    assert history.plan(6, *held)[0].base == NOTHING and not history._merged


def test_where_merging_fails_the_chain_is_sent(monkeypatch, caplog) -> None:
    def broken(*_) -> bytes:
        raise MemoryError("no room")

    learner, actor = asleep(monkeypatch, broken)
    assert len(learner.history.plan(6, *actor.replica.held(0))) == 6 and "could not be merged" in caplog.text
    assert actor.sync(learner, 6) and holds(actor, learner)


def test_a_released_state_is_read_no_more() -> None:
    """A publication overwrites it at once, while actors may ask for the newest version."""
    learner, actor = Learner(), Actor()
    learner.step(0.1)
    learner.history.release(learner._spares[0])
    learner._spares[0].buffer[:] = 0
    assert actor.sync(learner, 1) and holds(actor, learner)


def test_a_merge_that_failed_is_tried_again_with_the_next_version(monkeypatch) -> None:
    merge, fails = history_module.merge, [True]

    def sometimes(*args) -> bytes:
        if fails:
            raise MemoryError
        return merge(*args)

    learner, actor = asleep(monkeypatch, sometimes)
    held = actor.replica.held(0)
    assert [hop.base for hop in learner.history.plan(6, *held)] == list(range(6)), "as they are"
    fails.clear()
    assert len(learner.history.plan(6, *held)) == 6, "it is not tried again and again"
    learner.step(0.0005)
    learner.history.plan(7, *held)
    (hop,) = learner.history.plan(6, *held)
    assert (hop.base, hop.version) == (0, 6)


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


def test_the_two_newest_versions_are_held_whole_and_no_more() -> None:
    learner = Learner()
    for _ in range(3):
        learner.step(0.01)
    newcomer = Actor()
    assert newcomer.sync(learner, 2) and holds(newcomer, learner), "nobody has asked for a base snapshot before"
    for version in range(4, 8):
        learner.history.add(version, f"digest {version}", State(SPECS), None)
    assert len(learner.history._states) == 2


NBYTES = 16384


class MadeUp:
    """A history of weights of NBYTES bytes, whose deltas are of chosen sizes and say nothing; so do merged ones."""

    def __init__(self, monkeypatch, *, keep: int = 100, snapshot_every: int = 100, merged: int = 0):
        self.merges = []
        monkeypatch.setattr(history_module, "merge", lambda chain, _: self.merges.append(chain) or bytes(merged))
        specs = [TensorSpec("w", "uint8", (NBYTES,))]
        self.state = State(specs)
        self.history = History(Layout(specs, BLOCK), keep=keep, snapshot_every=snapshot_every)
        self.history.add(0, "0", self.state, None)

    def add(self, *sizes: int) -> None:
        for size in sizes:
            version = self.history.version + 1
            self.history.add(version, str(version), self.state, bytes(size))

    def route(self, version: int, held: int) -> list[tuple[int, int]] | None:
        """Where the hops of a plan begin and end; what is held has the right digest."""
        hops = self.history.plan(version, held, "" if held == NOTHING else str(held))
        return None if hops is None else [(hop.base, hop.version) for hop in hops]

    @property
    def kept(self) -> list[int]:
        return [base for base in range(self.history.version) if self.history.payload(base, base + 1)]


def test_one_who_is_there_or_ahead_gets_no_delta(monkeypatch) -> None:
    made = MadeUp(monkeypatch)
    made.add(10, 10)
    assert made.route(2, 2) == [(NOTHING, 2)] and made.route(3, 2) is None
    assert [hop.row() for hop in made.history.plan(2, 1, "1")] == [(1, 2, 10, Hop.of(1, 2, bytes(10)).checksum)]


@pytest.mark.parametrize(("more", "route"), [(0, (0, 1)), (1, (NOTHING, 1))])
def test_a_delta_is_sent_while_it_is_hardly_longer_than_the_weights(monkeypatch, more: int, route) -> None:
    made = MadeUp(monkeypatch)
    made.add(NBYTES + history_module.HEADS + more)
    assert made.route(1, 0) == [route]


@pytest.mark.parametrize(("more", "kept"), [(0, [0, 1, 2]), (1, [1, 2])])
def test_deltas_of_twice_the_weights_are_kept(monkeypatch, more: int, kept: list[int]) -> None:
    made = MadeUp(monkeypatch)
    made.add(NBYTES, NBYTES // 2, NBYTES // 2 + more)
    assert made.kept == kept


def test_the_newest_delta_is_kept_however_long_it_is(monkeypatch) -> None:
    made = MadeUp(monkeypatch)
    made.add(10, 3 * NBYTES)
    assert made.kept == [1]
    made.add(10)
    assert made.kept == [2], "and what it pushed out does not count any more"
    made.add(10, 10)
    assert made.kept == [2, 3, 4]


def test_so_many_deltas_are_kept_and_those_since_a_base_snapshot(monkeypatch) -> None:
    made = MadeUp(monkeypatch, keep=2, snapshot_every=6, merged=25)
    made.add(10, 10, 10)
    assert made.kept == [1, 2]
    assert made.route(3, NOTHING) == [(NOTHING, 3)]
    made.add(10, 10, 10, 10, 10)
    assert made.kept == [3, 4, 5, 6, 7] and made.route(8, NOTHING) == [(NOTHING, 3), (3, 8)]
    made.add(10)
    assert made.kept == [7, 8], "it is six versions old"
    assert made.route(9, NOTHING) == [(NOTHING, 9)]


@pytest.mark.parametrize(("more", "route"), [(0, [(NOTHING, 0), (0, 1)]), (1, [(NOTHING, 1)])])
def test_a_base_snapshot_serves_up_to_deltas_of_half_the_weights(monkeypatch, more: int, route) -> None:
    made = MadeUp(monkeypatch)
    assert made.route(0, NOTHING) == [(NOTHING, 0)]
    made.add(NBYTES // 2 + more)
    assert made.route(1, NOTHING) == route


@pytest.mark.parametrize(("merged", "route"), [(19, [(0, 2)]), (20, [(0, 1), (1, 2)])])
def test_a_merged_delta_is_sent_where_it_is_shorter(monkeypatch, merged: int, route) -> None:
    made = MadeUp(monkeypatch, merged=merged)
    made.add(10, 10)
    assert made.route(2, 0) == made.route(2, 0) == route and made.merges == [[bytes(10), bytes(10)]]
    assert made.route(1, 0) == [(0, 1)] and len(made.merges) == 1, "one delta is as it is"


@pytest.mark.parametrize(("hops", "sent"), [(32, 32), (33, 1)])
def test_more_than_32_deltas_are_merged_even_if_that_is_longer(monkeypatch, hops: int, sent: int) -> None:
    made = MadeUp(monkeypatch, merged=1000)
    made.add(*[10] * hops)
    assert len(made.history.plan(hops, 0, "0")) == sent


@pytest.mark.parametrize(("merged", "kept"), [(NBYTES // 4, 2), (NBYTES // 4 + 1, 1)])
def test_merged_deltas_of_half_the_weights_are_kept_the_newest_longest(monkeypatch, merged: int, kept: int) -> None:
    made = MadeUp(monkeypatch, merged=merged)
    made.add(*[merged] * 3)
    assert made.route(2, 0) == [(0, 2)] and made.route(3, 0) == [(0, 3)]
    assert [bool(made.history.payload(0, version)) for version in (2, 3)] == [kept == 2, True]


@pytest.mark.parametrize(("more", "kept"), [(0, True), (1, False)])
def test_a_merged_delta_much_longer_than_the_weights_is_not_kept(monkeypatch, more: int, kept: bool) -> None:
    made = MadeUp(monkeypatch, merged=NBYTES + history_module.HEADS + more)
    made.add(NBYTES, NBYTES)
    assert made.route(2, 0) == ([(0, 2)] if kept else [(NOTHING, 2)])
    assert (made.history.payload(0, 2) is not None) == kept


def test_a_payload_is_that_of_the_hop_or_none(monkeypatch) -> None:
    made = MadeUp(monkeypatch, merged=7)
    assert made.history.payload(NOTHING, 0) is None, "there is no base snapshot yet"
    made.add(10, 11)
    assert made.route(2, 0) == [(0, 2)] and made.route(2, NOTHING) == [(NOTHING, 2)]
    sizes = {(0, 1): 10, (1, 2): 11, (0, 2): 7, (NOTHING, 2): NBYTES}
    assert {ends: made.history.payload(*ends).nbytes for ends in sizes} == sizes
    assert [made.history.payload(*ends) for ends in ((NOTHING, 1), (1, 3), (0, 3), (2, 3))] == [None] * 4


def test_nobody_who_holds_no_whole_weights_can_serve_them_and_all_must_wait(monkeypatch) -> None:
    """A relay that has only deltas has no way to offer yet; with whole weights it has, or there is none."""
    made = MadeUp(monkeypatch)
    made.add(10, 10, 10)
    assert made.route(1, NOTHING) == [], "of version 1 there are neither weights nor a base snapshot before it"
    made.history.release(made.state)
    assert made.route(3, NOTHING) is None and made.route(3, 2) == [(2, 3)]
