"""Weights from a real publisher to real subscribers over real sockets, and from actor to actor; the engine is a
stand-in that records. (Failures of relays: `tests/chaos`.)"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from actors import sources
from actors.relay import Relay
from actors.sources import CHUNK_BYTES, Unreachable
from actors.subscriber import TRIES, Subscriber
from areal_like.weights.replica import Update
from areal_like.weights.server import WeightServer
from areal_like.weights.state import State, TensorSpec
from areal_like.wire import keys
from areal_like.wire.link import BusError
from areal_like.wire.messages import Chunk, Manifest, Message
from buffer.fleet import RelayTree
from learners import publication
from learners.publication import Coding, Publisher


class RecordingEngine:
    def __init__(self) -> None:
        self.version, self.digest, self.loaded = -1, "", []

    async def load(self, update: Update) -> None:
        self.loaded.append((update.version, update.state.buffer.copy()))
        self.version, self.digest = update.version, update.digest


def state(seed: int, nbytes: int) -> State:
    specs = [TensorSpec("a", "uint8", (3,)), TensorSpec("b", "uint8", (nbytes - 3,))]
    made, rng = State(specs), np.random.default_rng(seed)
    for spec, bits in made.tensors():
        bits[:] = rng.integers(0, 256, spec.count)
    return made


def moved(before: State, seed: int, density: float = 0.01) -> State:
    after = State(before.specs, before.buffer.copy())
    rng = np.random.default_rng(seed)
    for _, bits in after.tensors():
        bits[rng.random(bits.size) < density] ^= 1
    return after


class Source:
    """A publisher that gets whole states, and waits until each is announced."""

    def __init__(self, folder: Path, keys: str | None = None, **coding):
        self.manifests: list[Manifest] = []
        self.publisher = Publisher(f"ipc://{folder}/w", Coding(**coding), self.manifests.append, keys)

    def publish(self, version: int, sent: State) -> dict:
        def snapshot(into=None, done=None) -> State:
            into = into or State(sent.specs)
            half = into.nbytes // 2
            for part in (slice(0, half), slice(half, None)):
                into.buffer[part] = sent.buffer[part]
                if done:
                    done(half if part.start == 0 else into.nbytes)
            return into

        self.publisher.publish(version, snapshot)
        assert self.publisher.wait() == self.manifests[-1]
        return self.manifests[-1]


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    source = Source(tmp_path)
    yield source
    source.publisher.close()


def subscriber_of(engine: RecordingEngine, **more) -> Subscriber:
    return Subscriber(engine, "actor", lambda *_: None, **more)


async def _apply(subscriber: Subscriber, *manifests: Manifest) -> None:
    for manifest in manifests:
        await subscriber.apply(manifest)
    subscriber.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_chain_of_deltas_is_the_weights(tmp_path: Path, overlap: bool) -> None:
    """2 M weights in blocks, in order and with skipped versions: compiled kernels, a thread on each side."""
    source, engine = Source(tmp_path, overlap=overlap, block_bytes=1 << 20), RecordingEngine()
    specs = [
        TensorSpec("norm", "bfloat16", (999,)),
        TensorSpec("w", "bfloat16", (1000, 1999)),
        TensorSpec("x", "float32", (77, 99)),
    ]
    rng = np.random.default_rng(0)
    states = [State(specs, rng.integers(0, 256, State(specs).nbytes, dtype=np.uint8))]
    subscriber = subscriber_of(engine, sweep_every=2)

    async def follow() -> None:
        for version in range(8):
            if version:
                states.append(moved(states[-1], version))
            manifest = source.publish(version, states[-1])
            assert manifest.digest == states[-1].digest()
            if version not in (3, 4):
                await subscriber.apply(manifest)
                assert engine.loaded[-1][1].tobytes() == states[-1].buffer.tobytes()
        subscriber.close()

    asyncio.run(follow())
    source.publisher.close()
    assert subscriber.totals["deltas"] == 5 and not subscriber.full_syncs
    assert subscriber.stats()["weight_bytes"] < 2 * states[0].nbytes
    metrics = source.publisher.metrics
    assert metrics["publish/density"] == pytest.approx(0.01, rel=0.1) and metrics["publish/ratio"] > 20


def test_bits_that_the_engine_begins_with_are_built_on(source: Source) -> None:
    """An actor that has made the same initial weights needs no whole weights."""
    before = state(1, 100_000)
    engine, subscriber = RecordingEngine(), None
    engine.digest = before.digest()
    subscriber = subscriber_of(engine, state=State(before.specs, before.buffer.copy()))
    first = source.publish(0, before)

    async def follow() -> None:
        await subscriber.apply(first)
        assert engine.version == 0 and engine.loaded == [] and subscriber.stats()["weight_bytes"] == 0
        await subscriber.apply(source.publish(1, moved(before, 1)))
        subscriber.close()

    asyncio.run(follow())
    assert engine.version == 1 and (subscriber.totals["deltas"], subscriber.totals["base_snapshots"]) == (1, 0)


def test_wrong_bits_never_reach_the_engine(source: Source) -> None:
    engine = RecordingEngine()
    manifest = replace(source.publish(1, state(1, 100)), digest="0" * 32)
    subscriber = subscriber_of(engine)
    with pytest.raises(BusError, match="wrong bits"):
        asyncio.run(_apply(subscriber, manifest))
    assert engine.loaded == [] and subscriber.full_syncs == {"wrong digest": TRIES}


class SpoilingServer(WeightServer):
    """Loses the first `lost` chunks, like a broken connection, and flips a bit in the first `spoilt` deltas."""

    lost = spoilt = 0

    def _serve(self) -> None:
        send = self._router.send

        def spoiling(peer: bytes, message: Message, payloads=()) -> None:
            if isinstance(message, Chunk) and self.lost:
                self.lost -= 1
                return
            if isinstance(message, Chunk) and message.base >= 0 and self.spoilt:
                self.spoilt -= 1
                payloads = [bytes(payloads[0][:-1]) + bytes([payloads[0][-1] ^ 1])]
            send(peer, message, payloads)

        self._router.send = spoiling
        super()._serve()


def test_chunks_that_were_lost_are_asked_for_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(SpoilingServer, "lost", 3)
    monkeypatch.setattr(publication, "WeightServer", SpoilingServer)
    monkeypatch.setattr(sources, "RETRY_SECONDS", 0.05)
    source, engine, sent = Source(tmp_path), RecordingEngine(), state(1, 20 * CHUNK_BYTES + 17)
    manifest = source.publish(4, sent)
    asyncio.run(asyncio.wait_for(_apply(subscriber_of(engine), manifest), 60))
    assert engine.digest == sent.digest() and source.publisher._server.lost == 0
    source.publisher.close()


def test_a_spoilt_delta_ends_in_whole_weights(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(publication, "WeightServer", SpoilingServer)
    source, engine, before = Source(tmp_path), RecordingEngine(), state(1, 50_000)
    subscriber, after = subscriber_of(engine), moved(before, 1)

    async def follow() -> None:
        await subscriber.apply(source.publish(0, before))
        source.publisher._server.spoilt = 1
        await subscriber.apply(source.publish(1, after))
        await subscriber.apply(source.publish(2, before))
        subscriber.close()

    asyncio.run(follow())
    source.publisher.close()
    assert subscriber.full_syncs == {"wrong checksum": 1}
    assert [bits.tobytes() for _, bits in engine.loaded] == [s.buffer.tobytes() for s in (before, after, before)]


FOLLOW_SECONDS = 60.0


class Actor:
    """A subscriber that is also a relay, at its place in the buffer's tree."""

    def __init__(self, folder: Path, number: int, tree: RelayTree, keys_folder: str | None = None):
        self.name, self.tree, self.engine = f"a{number}", tree, RecordingEngine()
        self.subscriber = Subscriber(self.engine, self.name, lambda *_: None, keys=keys_folder)
        self.relay = Relay(
            f"ipc://{folder}/{number}", lambda: self.subscriber.sources.received, keep=8, snapshot_every=50,
            keys=keys_folder,
        )  # fmt: skip
        self.subscriber.relay = self.relay
        tree.join(self.name, self.relay.offer.endpoint, self.relay.offer.key)

    async def apply(self, manifest: Manifest) -> None:
        await self.subscriber.apply(replace(manifest, relays=self.tree.above(self.name)))
        assert self.engine.digest == manifest.digest
        assert self.engine.loaded[-1][1].tobytes() == self.subscriber.replica.state.buffer.tobytes()


async def together(actors: list[Actor], manifest: Manifest) -> None:
    async with asyncio.timeout(FOLLOW_SECONDS):
        await asyncio.gather(*(actor.apply(manifest) for actor in actors))


async def follow_all(source: Source, actors: list[Actor], sent: list[State]) -> None:
    for version, weights in enumerate(sent):
        await together(actors, source.publish(version, weights))


def weights() -> State:
    specs = [TensorSpec("w", "bfloat16", (1000, 1500)), TensorSpec("norm", "bfloat16", (1000,))]
    return State(specs, np.random.default_rng(0).integers(0, 256, State(specs).nbytes, dtype=np.uint8))


def egress(source: Source) -> int:
    return int(source.publisher.metrics["publish/bytes"])


def test_sixteen_actors_cost_the_learner_as_much_as_its_fan_out(tmp_path: Path) -> None:
    """The same versions with and without relays; then one more actor joins, and costs the learner nothing."""
    sent = [weights()]
    for version in range(1, 4):
        sent.append(moved(sent[-1], version))
    bytes_sent = {}
    for fanout in (0, 2):
        folder = tmp_path / str(fanout)
        folder.mkdir()
        source, tree = Source(folder), RelayTree(fanout)
        actors = [Actor(folder, number, tree) for number in range(16)]
        asyncio.run(follow_all(source, actors, sent))
        bytes_sent[fanout] = egress(source)
        if fanout:
            actors.append(Actor(folder, 16, tree))
            asyncio.run(together(actors[-1:], source.manifests[-1]))
            assert egress(source) == bytes_sent[fanout]
            assert actors[-1].subscriber.stats()["weight_bytes_relayed"] >= sent[0].nbytes
        assert not any(actor.subscriber.full_syncs for actor in actors)
        for actor in actors:
            actor.subscriber.close()
        source.publisher.close()
    assert bytes_sent[0] == 16 / 2 * bytes_sent[2]


def test_a_relay_is_a_server_with_a_key_of_its_own(tmp_path: Path, monkeypatch) -> None:
    """A peer on the allow-list is served; one without keys, or that expects another key, is not."""
    monkeypatch.setattr("actors.sources.RELAY_SECONDS", 0.5)
    folder = tmp_path / "keys"
    keys.make(folder)
    actor_keys = str(keys.add_client(folder, "far"))
    (Path(actor_keys) / "clients").symlink_to(folder / "clients")
    assert not (Path(actor_keys) / "server.key_secret").exists()
    source, tree = Source(tmp_path, keys=str(folder)), RelayTree(1)
    first, second = Actor(tmp_path, 0, tree, actor_keys), Actor(tmp_path, 1, tree, actor_keys)
    assert first.relay.offer.key

    async def follow() -> None:
        manifest = source.publish(0, weights())
        await together([first, second], manifest)
        assert second.subscriber.stats()["weight_bytes_relayed"] == second.subscriber.stats()["weight_bytes"] > 0
        endpoint = first.relay.offer.endpoint
        server_key = keys.client_pair(folder, "actor")[2].decode()
        for who, key in ((None, ""), (str(folder), server_key)):
            stranger = Subscriber(RecordingEngine(), "stranger", lambda *_: None, keys=who)
            stranger.sources.set(replace(manifest, relays=[[endpoint, key]]))
            with pytest.raises(Unreachable):
                await stranger.sources.plan(0, 0, -1, "", bool)
            stranger.close()

    asyncio.run(asyncio.wait_for(follow(), FOLLOW_SECONDS))
    for actor in (first, second):
        actor.subscriber.close()
    source.publisher.close()
