"""Weights that actors hand on: how few bytes the learner sends, and keys. (Failures: `tests/chaos`.)"""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from actors.relay import Relay
from actors.sources import Unreachable
from actors.subscriber import Subscriber
from areal_like.weights.state import State, TensorSpec
from areal_like.wire import keys
from areal_like.wire.messages import Manifest
from buffer.fleet import RelayTree
from tests.integration.test_weights import RecordingEngine, Source, moved

SECONDS = 60.0


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
    async with asyncio.timeout(SECONDS):
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

    asyncio.run(asyncio.wait_for(follow(), SECONDS))
    for actor in (first, second):
        actor.subscriber.close()
    source.publisher.close()
