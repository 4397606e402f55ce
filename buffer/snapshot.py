"""Active groups as records of a snapshot, and back. Payloads stay in the journal: a record has their places."""

from __future__ import annotations

from collections.abc import Sequence

from buffer.entries import Entries
from buffer.entry import Entry, PartialGroup, Stage
from buffer.events import Held
from buffer.segment_file import Extent, Payload, Read, Stored

_FIELDS = tuple(name for name in Held.__struct_fields__ if name not in ("stored", "left"))
"""Fields of an entry that a record has under the same names."""


def held_of(entries: Entries) -> list[Held]:
    """By stage, to keep the order of the queue. All payloads must be in the journal."""
    return [_held(entry) for entry in entries.of(*Stage)]


def entries_of(groups: Sequence[Held], read: Read | None, now: float) -> Entries:
    """`read` reads the payloads that the records name. Times count from `now`, in seconds."""
    entries = Entries()
    for held in groups:
        copied = {name: getattr(held, name) for name in _FIELDS}
        entry = Entry(**copied, admitted_at=now, pushed_at=now)
        entry.stage = Stage(entry.stage)
        entry.payload = _stored(held.stored, read)
        if held.left:
            entry.partial = PartialGroup(held.left[0], _stored(held.left[1], read))
        entries.add(entry)
    return entries


def _stored(extent: tuple[int, int, int, int] | None, read: Read | None) -> Payload:
    return Stored(read, extent=Extent(*extent)) if extent else b""


def _held(entry: Entry) -> Held:
    stored = _extent(entry.payload) if len(entry.payload) else None
    left = (entry.partial.head, _extent(entry.partial.payload)) if entry.partial else None
    return Held(**{name: getattr(entry, name) for name in _FIELDS}, stored=stored, left=left)


def _extent(payload: Payload) -> Extent:
    if not isinstance(payload, Stored) or payload.extent is None:
        raise TypeError("a snapshot can't hold a payload that is not in the journal")
    return payload.extent
