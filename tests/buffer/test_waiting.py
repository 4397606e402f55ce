"""Payloads that wait on the disk, and the error where the disk has lost them."""

from pathlib import Path

import numpy as np
import pytest

from areal_like.types import Completion, PartialSample
from areal_like.wire.partials import encode_partial
from buffer.groups import GroupManager
from buffer.journal import Recorded, reader
from buffer.policies import in_order
from buffer.recovery import restore
from buffer.segment_file import Stored, load
from buffer.staleness import Bound
from buffer.store import Stage
from tests.buffer.house import House
from tests.buffer.test_acknowledged import house, push_all, said, settle


def damage(buffer: House, folder: Path, held: Stored) -> None:
    """Damage one byte of a payload that only an older segment has, as after a resume."""
    buffer.say("learner", "checkpointed", {"step": 0})
    held.data = None
    path = folder / f"{held.extent.segment:06d}.wal"
    data = bytearray(path.read_bytes())
    data[held.extent.offset + held.size // 2] ^= 1
    path.write_bytes(data)


def test_a_group_whose_payload_the_disk_has_lost_is_rolled_out_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise no resume could continue. The other groups of its batch wait for it."""
    buffer = house(tmp_path, sync=False)
    push_all(buffer, 2)
    settle(buffer)
    lost = buffer.server.store.entries[1]
    damage(buffer, tmp_path, lost.payload)
    before = buffer.leases()
    buffer.say("learner", "want", {"index": 0, "version": 0})
    assert said(buffer, "batch") == 0 and "group 1 will be rolled out again" in caplog.text
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
    assert [bytes(load(entry.payload)) for entry in again.store.of(Stage.SERVED)]


def test_a_partial_group_that_the_disk_has_lost_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    buffer = house(tmp_path, sync=False)
    name = next(name for name in buffer.names if 0 in buffer.leases(name))
    call = Completion(np.zeros(3, np.int32), np.zeros(3, np.float32), [(0, 3)], "abort")
    meta, payload = encode_partial(0, {0: PartialSample({(1, 0): call})}, {0: "d0"})
    for actor in buffer.server.fleet:
        actor.slots = 0  # nobody takes it yet
    buffer.say(name, "hand_back", {"ids": [0], "partials": [meta], "leaving": False}, payload)
    entry = buffer.server.store.entries[0]
    assert entry.stage is Stage.QUEUED and entry.partial
    settle(buffer)
    damage(buffer, tmp_path, entry.partial.payload)
    for actor in buffer.server.fleet:
        actor.slots = 1000
    buffer.server.step(0)
    (body,) = [body for _, kind, body in buffer.router.sent if kind == "lease"][len(buffer.names) :]
    assert [row[0] for row in body["leases"]] == [0] and body["partials"] == []
    assert entry.partial is None and "group 0 starts again from its prompt" in caplog.text
    assert buffer.server.store.bytes == sum(each.size for each in buffer.server.store.entries.values())
