"""The buffer confirms only records in the journal: acknowledgements and batches wait for a full or slow disk, and go
out once when the journal has the records."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from buffer.events import Push, Serve, Snapshot
from buffer.journal import Journal, scan
from tests.buffer.house import B, House, asynchronous


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
