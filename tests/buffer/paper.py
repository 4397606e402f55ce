"""A journal on paper: records as they come back from files, payloads as the real one hands them out, no files."""

from typing import Any

import msgpack
import xxhash

from buffer.journal import SNAPSHOT, Record
from buffer.payloads import Extent, Payload, Stored
from buffer.recovery import restore, snapshot
from buffer.replay import Replay


class Paper:
    """`records` are those since the newest snapshot; payloads of before it are kept as well."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._payloads: list[bytes] = []

    def append(self, kind: str, fields: list[Any], payload: Payload = b"") -> Payload:
        held: Payload = b""
        if len(payload):
            data = payload.load() if isinstance(payload, Stored) else bytes(payload)
            extent = Extent(1, len(self._payloads), len(data), xxhash.xxh3_64_intdigest(data))
            self._payloads.append(data)
            held = Stored(self.read, extent=extent)
        self.records.append(Record(*msgpack.unpackb(msgpack.packb([kind, fields]), strict_map_key=False), held))
        return held

    def read(self, extent: Extent) -> bytes:
        data = self._payloads[extent.offset]
        assert (extent.size, extent.checksum) == (len(data), xxhash.xxh3_64_intdigest(data))
        return data

    def rotate(self, replay: Replay) -> None:
        """Nothing is left but a snapshot."""
        fields = snapshot(replay)
        self.records.clear()
        self.append(SNAPSHOT, fields)

    def restore(self, replay: Replay, next_batch: int, *, recorded: bool = True) -> None:
        """What the records say; if `recorded`, what changes from then on is added to them."""
        restore(replay, tuple(self.records), next_batch, 0.0, *[self.append][:recorded], read=self.read)
        replay.record = self.append
