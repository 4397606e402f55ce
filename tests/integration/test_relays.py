"""Weights that actors hand on: how few bytes the learner sends, what happens when relays die, and keys."""

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from msgspec.structs import replace

from actors.relay import Relay
from actors.sources import CHUNK_BYTES, Unreachable
from actors.subscriber import Subscriber
from areal_like.weights.replica import NOTHING
from areal_like.weights.state import State, TensorSpec
from areal_like.wire import keys
from areal_like.wire.bus import Router
from areal_like.wire.messages import Chunk, Fetch, Gone, Hops, Manifest
from buffer.relays import Relays
from tests.forked import Command
from tests.integration.runs import REPOSITORY, rows, summary
from tests.integration.test_weights import RecordingEngine, Source, moved

SECONDS = 60.0


class Actor:
    """A subscriber that is also a relay, at its place in the buffer's tree."""

    def __init__(self, folder: Path, number: int, tree: Relays, keys_folder: str | None = None):
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


@pytest.mark.parametrize("coding", ["delta", "full"])
def test_sixteen_actors_cost_the_learner_as_much_as_its_fan_out(tmp_path: Path, coding: str) -> None:
    """The same versions with and without relays; then one more actor joins, and costs the learner nothing."""
    sent = [weights()]
    for version in range(1, 4):
        sent.append(moved(sent[-1], version))
    bytes_sent = {}
    for fanout in (0, 2):
        folder = tmp_path / str(fanout)
        folder.mkdir()
        source, tree = Source(folder, coding=coding), Relays(fanout)
        actors = [Actor(folder, number, tree) for number in range(16)]
        asyncio.run(follow_all(source, actors, sent))
        bytes_sent[fanout] = egress(source)
        if fanout:
            actors.append(Actor(folder, 16, tree))
            asyncio.run(together(actors[-1:], source.manifests[-1]))
            assert egress(source) == bytes_sent[fanout]
            assert actors[-1].subscriber.stats()["weight_bytes_relayed"] >= sent[0].nbytes
        assert coding == "full" or not any(actor.subscriber.full_syncs for actor in actors)
        for actor in actors:
            actor.subscriber.close()
        source.publisher.close()
    assert bytes_sent[0] == 16 / 2 * bytes_sent[2]


def test_a_joiner_gets_a_base_snapshot_and_the_deltas_since_from_a_relay(tmp_path: Path) -> None:
    source, tree, sent = Source(tmp_path), Relays(1), weights()
    first, second, third = (Actor(tmp_path, number, tree) for number in range(3))

    async def follow() -> None:
        await together([first], source.publish(0, sent))
        await together([second], source.manifests[-1])  # makes the base snapshot of version 0
        before, newest = egress(source), sent
        for version in range(1, 4):
            newest = moved(newest, version, 0.001)
            await together([first], source.publish(version, newest))
        after = egress(source)
        await together([second, third], source.manifests[-1])
        assert before < after == egress(source)

    asyncio.run(follow())
    joiner = third.subscriber
    assert third.engine.version == 3 and joiner.totals["base_snapshots"] == 1
    assert joiner.stats()["weight_bytes_relayed"] == joiner.stats()["weight_bytes"] >= sent.nbytes
    for actor in (first, second, third):
        actor.subscriber.close()
    source.publisher.close()


def test_relays_that_wait_for_one_another_are_left(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("actors.sources.PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr("areal_like.weights.server.LATER_SECONDS", 0.05)
    source, tree = Source(tmp_path), Relays(0)
    actors = [Actor(tmp_path, number, tree) for number in range(2)]
    before = weights()

    async def follow() -> None:
        await together(actors, source.publish(0, before))
        manifest = source.publish(1, moved(before, 1))
        offers = [[actor.relay.offer.endpoint, actor.relay.offer.key] for actor in actors]
        async with asyncio.timeout(SECONDS):
            pairs = zip(actors, reversed(offers), strict=True)
            await asyncio.gather(*(actor.subscriber.apply(replace(manifest, relays=[other])) for actor, other in pairs))

    asyncio.run(follow())
    assert {actor.engine.digest for actor in actors} == {source.manifests[-1].digest}
    assert sum(actor.subscriber.sources.left for actor in actors) >= 1
    for actor in actors:
        actor.subscriber.close()
    source.publisher.close()


class Liar:
    """Replaces a relay: answers each `sync` and `fetch` as `lie` says."""

    def __init__(self, folder: Path, lie: str):
        self.lie, self._router, self._ending = lie, Router(f"ipc://{folder}/liar"), threading.Event()
        self.offer = [self._router.endpoint, ""]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ending.is_set():
            if received := self._router.receive(timeout=0.05):
                self._answer(*received)

    def _answer(self, peer: bytes, received: Any) -> None:
        asked = received.message
        hop = (NOTHING, asked.version, weights().nbytes, "")
        if self.lie == "rubbish":
            self._router.socket.send_multipart([peer, b"rubbish"])
        elif isinstance(asked, Fetch) and self.lie == "gone":
            self._router.send(peer, Gone(asked.part, asked.version))
        elif isinstance(asked, Fetch):
            size = min(CHUNK_BYTES, weights().nbytes - asked.offset)
            self._router.send(peer, Chunk(asked.part, asked.base, asked.version, asked.offset), [bytes(size)])
        elif self.lie == "many":
            hops = [(0, 1, weights().nbytes, xxhash_of_zeros())] * 99
            self._router.send(peer, Hops(asked.part, asked.version, hops))
        else:
            newer = {"nothing": [], "elsewhere": [(NOTHING, 99, weights().nbytes, "")]}
            self._router.send(peer, Hops(asked.part, asked.version, newer.get(self.lie, [hop])))

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self._router.close()


def xxhash_of_zeros() -> str:
    return xxhash.xxh3_64_hexdigest(bytes(weights().nbytes))


@pytest.mark.parametrize("lie", ["rubbish", "gone", "nothing", "elsewhere", "bits", "many"])
def test_a_relay_that_lies_is_left(tmp_path: Path, monkeypatch, lie: str) -> None:
    """The last announced version arrives all the same, though no later announcement follows."""
    monkeypatch.setattr("actors.sources.PATIENCE_SECONDS", 0.3)
    source, liar, engine = Source(tmp_path), Liar(tmp_path, lie), RecordingEngine()

    async def follow() -> None:
        subscriber = Subscriber(engine, "a0", lambda *_: None)
        running = asyncio.create_task(subscriber.run())
        for version, sent in enumerate([weights(), moved(weights(), 1)]):
            subscriber.sources._avoided.clear()
            subscriber.announce(replace(await asyncio.to_thread(source.publish, version, sent), relays=[liar.offer]))
            async with asyncio.timeout(SECONDS):
                while engine.version < version and not running.done():
                    await asyncio.sleep(0.02)
            assert not running.done(), running.exception()
        assert engine.digest == source.manifests[-1].digest and subscriber.sources.left >= 2
        if lie == "many":
            assert subscriber.full_syncs["wrong size"] == 1, "is not collected without end"
        running.cancel()
        subscriber.close()

    try:
        asyncio.run(follow())
    finally:
        liar.close()
        source.publisher.close()


def test_a_relay_is_a_server_with_a_key_of_its_own(tmp_path: Path, monkeypatch) -> None:
    """A peer on the allow-list is served; one without keys, or that expects another key, is not."""
    monkeypatch.setattr("actors.sources.RELAY_SECONDS", 0.5)
    folder = tmp_path / "keys"
    keys.make(folder)
    actor_keys = str(keys.add_client(folder, "far"))
    (Path(actor_keys) / "clients").symlink_to(folder / "clients")
    assert not (Path(actor_keys) / "server.key_secret").exists()
    source, tree = Source(tmp_path, keys=str(folder)), Relays(1)
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


class Process:
    """`tests.integration.subscribing`."""

    def __init__(self, name: str, endpoint: str):
        command = [sys.executable, "-m", "tests.integration.subscribing", name, endpoint]
        self.process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.offer = list(self.said().values())

    def said(self) -> dict[str, Any]:
        assert self.process.stdout
        assert select.select([self.process.stdout], [], [], SECONDS)[0], "it says nothing"
        return json.loads(self.process.stdout.readline())

    def announce(self, manifest: Manifest, relays: list[Any]) -> None:
        assert self.process.stdin
        self.process.stdin.write(msgspec.json.encode(replace(manifest, relays=relays)) + b"\n")
        self.process.stdin.flush()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.communicate(timeout=SECONDS)


def until(event: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (result := event()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
    return result


@pytest.mark.integration
def test_a_run_with_relays_goes_on_when_one_is_killed(tmp_path: Path) -> None:
    """Four actors in a chain, of which the first is killed; the learner serves one at a time."""
    run = tmp_path / "run"
    command = ["scripts.train", "configs/quickstart.yaml", f"run.dir={tmp_path}", "run.name=run"]
    command += ["weights.fanout=1", "actors.count=4", "groups_per_batch=2", "sizing.group_size=4", "run.steps=40"]
    command += ["run.target_reward=null", "eval.prompts=8", "eval.every=0"]
    process = Command(command, tmp_path / "run.said")
    try:
        metrics = run / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 5, "train steps")
        joined = re.search(r"actor-0 joined \(pid (\d+)\)", (run / "logs" / "buffer.log").read_text())
        assert joined
        os.kill(int(joined[1]), signal.SIGKILL)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, said
    last = rows(run)[-1]
    # Three of four in peace. Who has lost its relay asks the learner for a while, on a busy machine for longer.
    assert last["rollout/weight_bytes_relayed"] > 0.2 * last["rollout/weight_bytes"] > 0
    assert last["step"] == 40 and summary(run)["ledger"]["trained"] == 80


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[Process]]:
    started = [Process(f"p{number}", f"ipc://{tmp_path}/p{number}") for number in range(3)]
    yield started
    for each in started:
        each.end()


@pytest.mark.integration
def test_a_relay_that_is_killed_is_routed_around(tmp_path: Path, processes: list[Process]) -> None:
    """It dies while two others wait for a version that it has not heard of; both end with the right bits, and next time
    they do not wait for it."""
    source, (relay, *others) = Source(tmp_path), processes
    sent = weights()
    manifest = source.publish(0, sent)
    relay.announce(manifest, [])
    for each in others:
        each.announce(manifest, [relay.offer])
    assert {each.said()["digest"] for each in processes} == {manifest.digest}
    assert egress(source) == sent.nbytes, "the others had it from the relay"
    for version in (1, 2):
        sent = moved(sent, version)
        manifest = source.publish(version, sent)
        for each in others:
            each.announce(manifest, [relay.offer])
        if version == 1:
            time.sleep(0.3)
            os.kill(relay.process.pid, signal.SIGKILL)
        said = [each.said() for each in others]
        assert {each["digest"] for each in said} == {manifest.digest}
        assert [each["relays_left"] for each in said] == [1.0, 1.0]
    source.publisher.close()
