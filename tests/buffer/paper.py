"""A journal in memory: records are encoded and decoded as on a disk, payloads are as the real journal hands them out,
and there are no files."""

from typing import Any

import xxhash

from areal_like.wire.groups import Head
from areal_like.wire.stored import Extent, Payload, Stored, load
from buffer.events import Admit, Event, Push, Snapshot, decode, encode
from buffer.groups import GroupManager
from buffer.journal import Record
from buffer.recovery import restore, standing
from buffer.staleness import Bound
from buffer.store import Store


class Paper:
    """`records`: those since the newest snapshot; payloads from before it are kept as well."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._payloads: list[bytes] = []

    def append(self, event: Event, payload: Payload = b"") -> Payload:
        held: Payload = b""
        if len(payload):
            data = payload.load() if isinstance(payload, Stored) else bytes(payload)
            extent = Extent(1, len(self._payloads), len(data), xxhash.xxh3_64_intdigest(data))
            self._payloads.append(data)
            held = Stored(self.read, extent=extent)
        self.records.append(Record(decode(encode(event)), held))
        return held

    def read(self, extent: Extent) -> bytes:
        data = self._payloads[extent.offset]
        assert (extent.size, extent.checksum) == (len(data), xxhash.xxh3_64_intdigest(data))
        return data

    def rotate(self, replay: GroupManager) -> None:
        """Forget all records; only a snapshot is left."""
        snapshot = replay.store.snapshot()
        self.records.clear()
        self.append(snapshot)

    def restore(self, replay: GroupManager, next_batch: int) -> None:
        """Restore the state that the records describe; later records are added to them."""
        restore(replay, tuple(self.records), next_batch, 0.0, self.append, read=self.read)

    def check(self, replay: GroupManager, bound: Bound) -> None:
        """The events that still count must make the same store as the live buffer has."""
        fresh = Bound(bound.max_staleness, bound.groups_per_batch, bound.interval)
        again = Store(fresh)
        again.read = self.read
        for each in standing(tuple(self.records)):
            again.apply(each.event, each.payload)
        assert content(again) == content(replay.store)


def content(store: Store) -> dict[str, Any]:
    """All that must be equal in a store and in one made by the same events."""
    facts = ["slot", "stage", "actor", "lease_version", "launch", "need", "head", "pushed_by", "batch", "pushed"]
    facts += ["version_at_push", "was_deferred", "cut"]
    groups = {
        entry.id: [*(getattr(entry, fact) for fact in facts), bytes(load(entry.payload))]
        for entry in store.entries.values()
    }
    counts = ["bytes", "pushes", "staleness_max", "planned", "decided", "scheduler"]
    found = {name: getattr(store, name) for name in counts} | {"ledger": store.ledger(), "groups": groups}
    found["stages"] = {stage: [entry.id for entry in store.entries.of(stage)] for stage in ("deferred", "served")}
    found["first"] = store.entries.first_queued and store.entries.first_queued.id
    return found | {"slots": (store.slots.end, sorted(store.slots.free))}


def note(said: Any) -> Snapshot:
    """A snapshot with this note and nothing else."""
    return Snapshot({"": {}}, 0, 0, (0, []), (1, 0, [0]), said, {}, {}, [])


def admitted(group_id: int) -> Record:
    """The record of an admission."""
    return Record(Admit(group_id, group_id, 8, 8, "a", 0))


def rolled_out(head: Head, payload: bytes, version: int = 0) -> list[Record]:
    """The records of a group from its admission to its push."""
    return [admitted(head.id), Record(Push(head, version, "a"), payload)]
