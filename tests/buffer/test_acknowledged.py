"""The buffer confirms only records in the journal: acknowledgements and batches wait for a full or slow disk, and go
out once when the journal has the records. Payloads that the disk has lost are rolled out again."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_like.wire.stored import Stored, load
from buffer.entries import Stage
from buffer.events import Push, Serve
from buffer.groups import GroupManager
from buffer.journal import Journal, Recorded, reader, scan
from buffer.policies import in_order
from buffer.recovery import restore
from buffer.staleness import Bound
from tests.buffer.house import B, House, asynchronous


class Disk:
    """Takes nothing while `full`; while `slow`, a sync does not return."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.full, self.ready = False, threading.Event()
        self.ready.set()
        for name in ("writev", "fdatasync"):
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
    """Run until the disk has everything, and the messages that waited for it are sent."""
    outbox, end = house.server.outbox, time.monotonic() + 30
    while time.monotonic() < end:
        house.server.step(0)
        if not outbox.blocked and outbox.journal.committed == outbox.journal.appended and not outbox.waiting:
            return
    raise AssertionError("the journal is stuck")


def said(house: House, kind: str) -> int:
    return sum(each == kind for _, each, _ in house.router.sent)


def push_all(house: House, count: int) -> None:
    for name in house.names:
        for group_id in house.leases(name)[:count]:
            house.push(name, group_id, 0)


@pytest.mark.parametrize(("sync", "how"), [(False, "full"), (True, "full"), (True, "slow")])
@pytest.mark.parametrize(("kind", "event", "messages"), [("pushed", Push, 4), ("batch", Serve, 1)])
def test_a_message_is_sent_once_the_journal_has_its_record(
    tmp_path: Path, disk: Disk, sync: bool, how: str, kind: str, event: type, messages: int
) -> None:
    """Otherwise a push would be lost, or the batch could have other groups after a crash."""
    buffer = house(tmp_path, sync)
    if event is Serve:
        push_all(buffer, B // 2)
        settle(buffer)
    disk.stop(how)
    for _ in range(20):  # peers repeat all that is not answered
        if event is Push:
            push_all(buffer, 2)
        buffer.say("learner", "want", {"index": 0, "version": 0})
    assert said(buffer, kind) == 0
    assert not any(isinstance(record.event, event) for record in scan(tmp_path)), "the disk does not have it"
    assert len(buffer.server.outbox.waiting) <= messages + 1
    disk.go_on()
    settle(buffer)
    assert said(buffer, kind) == messages == sum(isinstance(record.event, event) for record in scan(tmp_path))


def damage(buffer: House, folder: Path, held: Stored) -> None:
    """Damage one byte of a payload that only an older segment has, as after a resume."""
    buffer.say("learner", "checkpointed", {"step": 0})
    held.data = None
    path = folder / f"{held.extent.segment:06d}.wal"
    data = bytearray(path.read_bytes())
    data[held.extent.offset + held.size // 2] ^= 1
    path.write_bytes(data)


def test_a_group_whose_payload_the_disk_has_lost_is_rolled_out_again(tmp_path: Path) -> None:
    """Otherwise no resume could continue. The other groups of its batch wait for it."""
    buffer = house(tmp_path, sync=False)
    push_all(buffer, 2)
    settle(buffer)
    lost = buffer.server.store.entries[1]
    damage(buffer, tmp_path, lost.payload)
    before = buffer.leases()
    buffer.say("learner", "want", {"index": 0, "version": 0})
    assert said(buffer, "batch") == 0
    settle(buffer)
    assert buffer.leases()[len(before) :][:1] == [1] and lost.stage is Stage.RUNNING
    buffer.push(lost.actor, 1, 0)
    settle(buffer)
    assert [sorted(ids) for ids in buffer.batches()] == [[0, 1, 2, 3]]
    assert buffer.server.store.ledger()["dropped"] == {}
    again = GroupManager(Bound(1, 4), in_order)
    restore(again, Recorded(tmp_path), 0, 0.0, read=reader(tmp_path))
    (batch,) = buffer.batches()
    assert [entry.id for entry in again.serve(0)] == batch
    assert [bytes(load(entry.payload)) for entry in again.store.entries.of(Stage.SERVED)]
