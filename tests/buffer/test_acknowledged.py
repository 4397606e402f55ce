"""The buffer says only what the journal has: acknowledgements and batches wait for a full or slow disk, and go out once
when the journal has the records."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_like.wire.groups import pack_heads
from areal_like.wire.messages import Batch, Pushed, SetAside, Stop
from buffer.events import Defer, Push, Serve, Snapshot
from buffer.journal import Journal, scan
from buffer.outbox import MOST_ACKNOWLEDGEMENTS, Outbox
from tests.buffer.house import B, FakeRouter, House, asynchronous


class Disk:
    """Takes nothing while `full`; while `slow`, a sync does not return."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.full, self.ready = False, threading.Event()
        self.ready.set()
        for name in ("writev", "pwrite", "fdatasync"):
            monkeypatch.setattr(os, name, self._refusing(getattr(os, name)))

    def _refusing(self, real: Callable) -> Callable:
        def call(*args: object) -> object:
            assert self.ready.wait(30)
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args)

        return call

    def stop(self, how: str) -> None:
        self.full = how == "full"
        if how == "slow":
            self.ready.clear()

    def go_on(self) -> None:
        self.full = False
        self.ready.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch):
    disk = Disk(monkeypatch)
    yield disk
    disk.go_on()


def house(folder: Path, sync: bool) -> House:
    """A started controller with a journal; its actors hold leases."""
    house = House(asynchronous(max_staleness=1))
    journal = Journal(folder, sync=sync, keep=True)
    house.server.outbox.journal = journal
    house.server.groups.record = journal.append
    house.start()
    settle(house)
    return house


def settle(house: House) -> None:
    """Run until the disk has everything, and what waited for it is sent."""
    outbox, end = house.server.outbox, time.monotonic() + 30
    while time.monotonic() < end:
        house.server.step(0)
        if not outbox.blocked and outbox.journal.committed == outbox.journal.appended and not len(outbox):
            return
    raise AssertionError("the journal is stuck")


def said(house: House, kind: str) -> int:
    return sum(each == kind for _, each, _ in house.router.sent)


def push_all(house: House, count: int) -> None:
    for name in house.names:
        for group_id in house.leases(name)[:count]:
            house.push(name, group_id, 0)


@pytest.mark.parametrize(("sync", "how"), [(False, "full"), (True, "full"), (True, "slow")])
def test_a_push_is_acknowledged_once_the_journal_has_it(tmp_path: Path, disk: Disk, sync: bool, how: str) -> None:
    buffer = house(tmp_path, sync)
    disk.stop(how)
    push_all(buffer, 1)
    for _ in range(5):
        buffer.server.step(0)
    assert said(buffer, "pushed") == 0
    assert not any(isinstance(record.event, Push) for record in scan(tmp_path)), "the disk does not have it"
    disk.go_on()
    settle(buffer)
    assert said(buffer, "pushed") == 2
    assert sum(isinstance(record.event, Push) for record in scan(tmp_path)) == 2


@pytest.mark.parametrize(("sync", "how"), [(False, "full"), (True, "full"), (True, "slow")])
def test_a_batch_is_sent_once_the_journal_has_it(tmp_path: Path, disk: Disk, sync: bool, how: str) -> None:
    """Otherwise the batch could have other groups after a crash."""
    buffer = house(tmp_path, sync)
    push_all(buffer, B // 2)
    settle(buffer)
    disk.stop(how)
    for _ in range(3):  # it asks again
        buffer.say("learner", "want", {"index": 0, "version": 0})
    assert said(buffer, "batch") == 0
    assert not any(isinstance(record.event, Serve) for record in scan(tmp_path)), "the disk does not have it"
    disk.go_on()
    settle(buffer)
    assert said(buffer, "batch") == 1, "it waited once, though it was asked for three times"
    assert [event.batch for event, _ in scan(tmp_path) if isinstance(event, Serve)] == [0]


def test_pushes_that_come_again_while_the_disk_is_full_wait_once(tmp_path: Path, disk: Disk) -> None:
    """An hour of an actor that pushes the same groups every 5 s."""
    buffer = house(tmp_path, sync=False)
    disk.stop("full")
    for _ in range(720):
        push_all(buffer, 2)
    assert len(buffer.server.outbox) == 4
    disk.go_on()
    settle(buffer)
    assert said(buffer, "pushed") == 4


def test_acknowledgements_of_anything_are_bounded(tmp_path: Path, disk: Disk) -> None:
    """Also for a peer that invents ids; it repeats what gets no answer."""
    journal, router = Journal(tmp_path, sync=False, keep=False), FakeRouter()
    outbox = Outbox(router, journal)
    disk.stop("full")
    journal.append(Defer(0))
    for each in range(MOST_ACKNOWLEDGEMENTS + 1000):
        outbox.put(b"peer", Pushed([each]))
    outbox.put(b"learner", Batch(0, 0, 0, [], pack_heads([]), {}))
    outbox.flush()
    assert len(outbox) == MOST_ACKNOWLEDGEMENTS + 1 and not router.sent
    disk.go_on()
    outbox.flush()
    assert len(router.sent) == MOST_ACKNOWLEDGEMENTS + 1 and router.sent[-1][1] == "batch"


def test_a_checkpoint_makes_a_segment_that_says_where_the_payloads_lie(tmp_path: Path) -> None:
    buffer = house(tmp_path, sync=False)
    push_all(buffer, 2)
    settle(buffer)
    before = {entry.id: bytes(entry.payload.load()) for entry in buffer.server.store.entries.values() if entry.head}
    written = sum(path.stat().st_size for path in tmp_path.iterdir())
    buffer.say("learner", "checkpointed", {"step": 0})
    (snapshot,) = [record for record in scan(tmp_path) if isinstance(record.event, Snapshot)]
    assert not len(snapshot.payload) and len(before) == 4
    for each in buffer.server.store.payloads():
        each.data = None  # as after a resume
    read = {entry.id: entry.payload.load() for entry in buffer.server.store.entries.values() if entry.head}
    assert read == before
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > written


def test_messages_that_differ_wait_side_by_side_and_a_repeated_one_once() -> None:
    router = FakeRouter()
    waiting = Outbox(router, None)
    repeated = [SetAside(0, 1), SetAside(1, 1), SetAside(0, 1), Pushed([1, 2]), Pushed([1]), Pushed([1, 2]), Stop(True)]
    for message in repeated:
        waiting.put(b"a", message)
    waiting.put(b"b", SetAside(0, 1))
    waiting.flush()
    kinds = [(peer, kind, body.get("index", body.get("ids"))) for peer, kind, body in router.sent]
    assert kinds == [
        ("a", "set_aside", 1), ("a", "set_aside", 0), ("a", "pushed", [1]), ("a", "pushed", [1, 2]),
        ("a", "stop", None), ("b", "set_aside", 0),
    ]  # fmt: skip
