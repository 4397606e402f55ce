"""The buffer after a crash: the journal's records are made changes of `Replay` again.

`restore` is given the records since the newest snapshot, which it goes through twice and does not keep, and the batch
at which the learner goes on, that of its newest checkpoint. What had happened to groups has happened again then, with
two exceptions. Leases are void: groups that ran are QUEUED (and keep what an earlier lease had handed back). And
batches that the checkpoint does not hold have not been trained: their groups wait again, and `Replay.planned` has the
composition and order of each, so that they are served as before. Payloads stay in the journal until they are needed.

Slots follow from the order of admissions and departures alone as long as batches are served from their own slots. If
a policy has changed the order, they are given anew at the end; who ran where, and so who sat in which slot then, is
not in the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

from areal_like.groups import pack_heads, unpack_heads
from buffer.entries import NO_SLOT, Entry, Recorder, Stage, record_nothing
from buffer.injection import advance, start_at
from buffer.journal import SNAPSHOT, JournalError, Record
from buffer.partials import Partial
from buffer.payloads import Extent, Payload, Read, Stored
from buffer.replay import Replay


def no_payloads(extent: Extent) -> NoReturn:
    """In place of a reader, where no snapshot is expected to name payloads."""
    raise JournalError(f"nobody can read the payload at {extent}")


def restore(
    replay: Replay,
    records: Iterable[Record],
    next_batch: int,
    now: float,
    record: Recorder = record_nothing,
    read: Read = no_payloads,
) -> None:
    """Make the recorded changes, as far as the learner's checkpoint has them: batches before `next_batch`.

    Call it on an empty Replay, with `records` that can be gone through twice. From then on `record` is told of its
    changes; first of batches that were trained before the crash could be recorded. `read` reads the payloads that a
    snapshot names, once they are needed. Raises JournalError.
    """
    last_serve = _last_serves(records)
    reordered = False
    for number, each in enumerate(records):
        if each.kind == SNAPSHOT:
            _load_snapshot(replay, each, now, read)
        elif each.kind == "serve":
            batch, ids, _ = each.fields
            reordered |= not _in_own_slots(replay, batch, ids)
            if number == last_serve.get(batch):  # an earlier one was undone, by a crash or since it was untrainable
                _serve_again(replay, batch, ids, next_batch)
        elif each.kind == "finish":
            batch = each.fields[0]
            if batch < next_batch and number > last_serve.get(batch, -1):  # an earlier one was undone, too
                replay.finish(batch)
        else:
            _redo(replay, each, now)
    _check_trained(replay, next_batch)
    replay.record = record
    for batch in sorted({entry.batch for entry in replay.in_stage(Stage.SERVED) if entry.batch < next_batch}):
        replay.finish(batch)  # trained, but the crash came before the learner could say so
    _undo_what_is_lost(replay, next_batch)
    if reordered:
        _place(replay, next_batch)


def _last_serves(records: Iterable[Record]) -> dict[int, int]:
    """Batch → number of the record that says how it was served at last, unless it is to be served anew."""
    found: dict[int, int] = {}
    for number, each in enumerate(records):
        if each.kind == "serve":
            found[each.fields[0]] = number
        elif each.kind == "unserve":
            found = {batch: serve for batch, serve in found.items() if batch < each.fields[0]}
    return found


def _check_trained(replay: Replay, next_batch: int) -> None:
    """What a snapshot counts as trained can't be served again. Raises JournalError if the checkpoint lacks it."""
    held = replay.bound.batches.first(next_batch)
    if replay.trained > held:
        raise JournalError(
            f"the journal goes on after {replay.trained} trained groups, and the newest checkpoint, of step "
            f"{next_batch}, has {held} of them: a newer checkpoint is missing. Put it back, or start a new run"
        )


def _undo_what_is_lost(replay: Replay, next_batch: int) -> None:
    """Batches that are not in the checkpoint are planned anew; nobody runs anything."""
    served: dict[int, list[int]] = {}  # by a snapshot; a later record of the same batch stands in `planned` already
    for entry in sorted(replay.in_stage(Stage.SERVED), key=lambda entry: entry.slot):
        served.setdefault(entry.batch, []).append(entry.id)
        entry.batch = -1
        replay.move(entry, Stage.WAITING)
    plans = served | replay.planned
    replay.planned = {batch: ids for batch, ids in sorted(plans.items()) if batch >= next_batch}
    for entry in replay.in_stage(Stage.RUNNING) + replay.in_stage(Stage.QUEUED):
        entry.actor = ""
        if entry.slot == NO_SLOT:
            replay.defer(entry.id)
        elif entry.stage is Stage.RUNNING:
            replay.move(entry, Stage.QUEUED)


def _redo(replay: Replay, record: Record, now: float) -> None:
    fields = record.fields
    match record.kind:
        case "admit":
            group_id, row, launch, need, *spare = fields
            replay.admit(group_id, row, launch, need, "", 0, now, spare=bool(spare))
        case "open" | "place" | "take_up" | "defer":
            _redo_round(replay, record.kind, fields)
        case "push":
            (head,) = unpack_heads(fields[0])
            replay.accept(replay.entries[head.id], head, record.payload, fields[1], now)
        case "left_out":
            replay.leave_out(fields[0], tuple(fields[1]), fields[2])
        case "partial":
            entry = replay.entries[fields[0]["id"]]
            entry.moves = True  # whether it was deferred instead is told by a record of its own
            replay.hand_back(entry.id, Partial(fields[0], record.payload))
            entry.moves = False
        case "start":
            start_at(replay, fields[0])
        case "advance":
            advance(replay, fields[0])
        case "requeue":
            replay.requeue(fields[0])
        case "drop":
            replay.drop(*fields)
        case "filter":
            replay.filter(*fields)
        case "unserve":
            replay.unserve(fields[0])
        case _:
            raise JournalError(f"unknown kind of record {record.kind!r}: the journal is of another version")


def _redo_round(replay: Replay, kind: str, fields: list[Any]) -> None:
    match kind:
        case "open":
            replay.open_batch(*fields[1:])
        case "place":
            replay.give_place(*fields)
        case "take_up":
            replay.take_up(*fields)
        case "defer":
            replay.defer(fields[0])


def _in_own_slots(replay: Replay, batch: int, ids: list[int]) -> bool:
    first = replay.bound.batches.first(batch)
    found = (replay.entries.get(group_id) for group_id in ids)
    return {entry.slot for entry in found if entry} == set(range(first, first + len(ids)))


def _serve_again(replay: Replay, batch: int, ids: list[int], next_batch: int) -> None:
    if batch < next_batch:
        replay.mark_served(batch, ids)
    else:
        replay.planned[batch] = ids


def _place(replay: Replay, next_batch: int) -> None:
    """Slots for all: those of its batch for each group that is to be served again, later ones for the others."""
    first = replay.bound.batches.first
    placed = []
    for batch, ids in replay.planned.items():
        for slot, group_id in enumerate(ids, first(batch)):
            if group_id in replay.entries:
                replay.set_slot(group_id, slot)
                placed.append(group_id)
    replay.place_all(first(max(replay.planned, default=next_batch - 1) + 1), leave_out=placed)


def payloads(replay: Replay) -> list[Stored]:
    """All that the groups hold and the journal has."""
    held = [each for e in replay.entries.values() for each in (e.payload, e.partial.payload if e.partial else b"")]
    return [each for each in held if isinstance(each, Stored)]


def snapshot(replay: Replay) -> list[Any]:
    """The state as the fields of a record, for a journal's new segment; of payloads it says where they lie, so they
    must have been written."""
    deferred = replay.in_stage(Stage.DEFERRED)  # their order is that of the queue
    entries = [e for e in replay.entries.values() if e.stage is not Stage.DEFERRED] + deferred
    rows = [
        [
            e.id,
            e.row,
            e.slot,
            e.launch,
            e.need,
            e.stage.value,
            e.version_at_push,
            e.pushed,
            e.batch,
            _table(e),
            _extent(e.payload),
            [e.partial.meta, _extent(e.partial.payload)] if e.partial else None,
            e.deferred,
        ]
        for e in entries
    ]
    left = [dict(replay.filtered), dict(replay.dropped)]
    counts = [replay.admitted, replay.trained, *left, replay.requeued, replay.staleness_max, replay.pushes]
    rounds = [replay.bound.batches.state(), replay.scheduler_state, replay.deferrals]
    plan = [[batch, ids] for batch, ids in replay.planned.items()]
    return [counts, replay.slots.state(), plan, rows, rounds]


def _table(entry: Entry) -> dict[str, Any] | None:
    return pack_heads([entry.head]) if entry.head else None


def _extent(payload: Payload) -> Extent | None:
    """None for no payload."""
    if not len(payload):
        return None
    if not isinstance(payload, Stored) or payload.extent is None:
        raise TypeError("a payload that is not in the journal can't be part of a snapshot")
    return payload.extent


def _load_snapshot(replay: Replay, record: Record, now: float, read: Read) -> None:
    counts, slots, plan, rows, rounds = record.fields
    replay.admitted, replay.trained, filtered, dropped, replay.requeued, replay.staleness_max, replay.pushes = counts
    replay.filtered, replay.dropped = Counter(filtered), Counter(dropped)
    replay.slots.load(slots)
    batches, replay.scheduler_state, replay.deferrals = rounds
    replay.bound.batches.load(batches)
    replay.decided = {} if replay.scheduler_state is None else {replay.bound.batches.opened - 1: replay.scheduler_state}
    replay.planned = dict(plan)
    replay.clear()
    for group_id, row, slot, launch, need, stage, version, pushed, batch, table, extent, left, deferred in rows:
        head = unpack_heads(table)[0] if table else None
        payload, at = _stored(extent, read), Stage(stage)
        entry = Entry(group_id, row, slot, launch, need, at, "", 0, now, now, pushed, version, head, payload, batch)
        entry.deferred = deferred
        if left:
            entry.partial = Partial(left[0], _stored(left[1], read))
        replay.add(entry)
    replay.bytes = sum(entry.size for entry in replay.entries.values())


def _stored(extent: list[int] | None, read: Read) -> Payload:
    return Stored(read, extent=Extent(*extent)) if extent else b""
