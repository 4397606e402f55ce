"""Publishers with a part of the weights each, and subscribers to all, over sockets; threads play the ranks."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.subscriber import Subscriber
from areal_like.weights.layout import Layout
from areal_like.weights.state import State, TensorSpec
from areal_like.wire.messages import Manifest
from learners.publication import Coding, Publisher
from tests.integration.test_weights import RecordingEngine, moved, subscriber_of

SECONDS = 60.0
SPECS = [
    TensorSpec("norm", "bfloat16", (99,)),
    TensorSpec("w", "bfloat16", (1000, 199)),
    TensorSpec("x", "float32", (77, 99)),
    TensorSpec("small", "bfloat16", (2, 3)),
]


class Meeting:
    """Where the threads that play ranks exchange their reports."""

    def __init__(self, count: int):
        self._reports: list[Any] = [None] * count
        self._all_here = threading.Barrier(count)

    def gathered(self, part: int, report: Any) -> list[Any]:
        self._reports[part] = report
        self._all_here.wait(SECONDS)
        reports = list(self._reports)
        self._all_here.wait(SECONDS)
        return reports


class Others:
    def __init__(self, meeting: Meeting, part: int):
        self._meeting, self._part = meeting, part

    def begin(self, version: int) -> None:
        pass

    def gathered(self, report: Any) -> list[Any]:
        return self._meeting.gathered(self._part, report)


class Learner:
    """Publishes whole states in `parts`, and waits until each is announced."""

    def __init__(self, folder: Path, parts: int, **coding: Any):
        self.manifests: list[Manifest] = []
        meeting, made = Meeting(parts), Coding(**{"block_bytes": 1 << 16, **coding})
        self.publishers = [
            Publisher(f"ipc://{folder}/{part}", made, ignore if part else self.manifests.append, None, others)
            for part, others in enumerate(Others(meeting, part) for part in range(parts))
        ]

    def publish(self, version: int, whole: State) -> dict[str, Any]:
        parts = len(self.publishers)

        def one(part: int) -> None:
            layout = Layout(whole.specs, 1 << 16, part, parts)

            def snapshot(into: State | None = None, done: Callable[[int], None] | None = None) -> State:
                state = into or State(whole.specs, part=part, parts=parts)
                layout.copy_out(whole.buffer, state.buffer)
                if done:
                    done(state.nbytes)
                return state

            self.publishers[part].publish(version, snapshot)
            self.publishers[part].wait()

        with ThreadPoolExecutor(parts) as pool:
            errors = [future.exception() for future in [pool.submit(one, part) for part in range(parts)]]
        self.errors = [error for error in errors if error]
        return self.manifests[-1]

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()


def ignore(*_: Any) -> None:
    """Only the first rank announces anything."""


def weights() -> State:
    return State(SPECS, np.random.default_rng(0).integers(0, 256, State(SPECS).nbytes, dtype=np.uint8))


@pytest.mark.parametrize("coding", ["delta", "full"])
@pytest.mark.parametrize("parts", [1, 3])
def test_parts_arrive_as_one_version_whoever_asks_and_when(tmp_path: Path, parts: int, coding: str) -> None:
    learner, sent = Learner(tmp_path, parts, coding=coding), [weights()]
    engines = {"follows": RecordingEngine(), "late": RecordingEngine()}
    subscribers = {name: Subscriber(engine, name, ignore, sweep_every=2) for name, engine in engines.items()}

    async def follow() -> None:
        for version in range(6):
            manifest = learner.publish(version, sent[-1])
            assert manifest.digest == sent[-1].digest() and len(manifest.parts) == parts
            for name in engines if version >= 3 else ["follows"]:
                await asyncio.wait_for(subscribers[name].apply(manifest), SECONDS)
                assert engines[name].loaded[-1][1].tobytes() == sent[-1].buffer.tobytes()
            sent.append(moved(sent[-1], version))
        for subscriber in subscribers.values():
            subscriber.close()

    asyncio.run(follow())
    follows, late = (subscribers[name].stats() for name in ("follows", "late"))
    assert (follows["base_snapshots"], follows["deltas"]) == ((1, 5) if coding == "delta" else (6, 0))
    assert not follows["full_syncs"] or coding == "full"
    received = follows["weight_bytes"] + late["weight_bytes"]
    assert sum(publisher.metrics["publish/bytes"] for publisher in learner.publishers[:1]) <= received
    assert sum(publisher._server.bytes_sent for publisher in learner.publishers) == received
    learner.close()


def test_parts_of_which_one_can_only_be_had_newer_are_brought_to_the_same_version(tmp_path: Path) -> None:
    """Part 0 changes completely, so its deltas to the requested version are gone; part 1 still has them."""
    learner, engine, now = Learner(tmp_path, 2, keep=8), RecordingEngine(), weights()
    subscriber = subscriber_of(engine)

    async def follow() -> None:
        await asyncio.wait_for(subscriber.apply(learner.publish(0, now)), SECONDS)
        for version in range(1, 6):
            after = moved(now, version, 0.001)
            first = Layout(SPECS, 1 << 16, 0, 2)
            noise = np.random.default_rng(version).integers(0, 256, first.nbytes, dtype=np.uint8)
            first.copy_in(noise, 0, after.buffer)
            now.buffer[:] = after.buffer
            learner.publish(version, now)
        subscriber.announce(learner.manifests[-1])
        await asyncio.wait_for(subscriber.apply(learner.manifests[1]), SECONDS)
        subscriber.close()

    asyncio.run(follow())
    assert [version for version, _ in engine.loaded] == [0, 5]
    assert engine.digest == now.digest() == learner.manifests[-1].digest
    assert engine.loaded[-1][1].tobytes() == now.buffer.tobytes()
    learner.close()


def test_a_part_that_fails_is_told_to_all_and_nothing_is_announced(tmp_path: Path, monkeypatch) -> None:
    learner, now = Learner(tmp_path, 2), weights()
    learner.publish(0, now)
    history = learner.publishers[1]._publication.history
    monkeypatch.setattr(history, "add", lambda *_: 1 / 0)
    learner.publish(1, moved(now, 1))
    assert sorted(type(error).__name__ for error in learner.errors) == ["RuntimeError", "ZeroDivisionError"]
    (told,) = [error for error in learner.errors if isinstance(error, RuntimeError)]
    assert "part 1 of version 1 was not published: ZeroDivisionError" in str(told)
    assert [manifest.version for manifest in learner.manifests] == [0]
    learner.close()
