"""Recovery after a crash, and reading a journal: which events still count, and the state that they make.

A process that starts writes `Begin`: the learner resumes from a checkpoint, and later training is undone (`standing`).
These batches' groups wait, to be served again in the order of `Store.planned`. All other events count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from areal_like.wire.stored import Read
from buffer.entries import SERVED, WAITING
from buffer.events import Begin, Branch, Finish, Serve, ServeAgain, Snapshot
from buffer.groups import GroupManager, Recorder, record_nothing
from buffer.journal import Record
from buffer.segment_file import JournalError


def standing(records: Iterable[Record], next_batch: int | None = None) -> Iterator[Record]:
    """The `records` that still count. Reads `records` twice and does not keep them. `next_batch`: where the learner is
    about to resume (None: it does not resume). For a batch that was undone later, `Serve` becomes `ServeAgain`."""
    begun = [(number, each.event.batch) for number, each in enumerate(records) if isinstance(each.event, Begin)]
    least = math.inf if next_batch is None else next_batch
    undone = [(math.inf, least)]  # (number of the undoing record, first undone batch); the earliest on top
    for number, batch in reversed(begun):
        least = min(least, batch)
        undone.append((number, least))
    for number, each in enumerate(records):
        while undone and undone[-1][0] <= number:
            undone.pop()
        event = each.event
        if undone and isinstance(event, Serve | Finish) and event.batch >= undone[-1][1]:
            if isinstance(event, Serve):
                yield Record(ServeAgain(event.batch, event.ids))
        else:
            yield each


def history(records: Iterable[Record]) -> Iterator[Record]:
    """The records of a whole journal that still count, without snapshots. Raises JournalError if it begins late."""
    for number, each in enumerate(standing(records)):
        if not isinstance(each.event, Snapshot):
            yield each
        elif number == 0:
            raise JournalError("the journal lacks its beginning: it is whole only with buffer.keep_journal=true")


def restore(
    groups: GroupManager,
    records: Iterable[Record],
    next_batch: int,
    now: float,
    record: Recorder = record_nothing,
    read: Read | None = None,
) -> None:
    """Bring empty `groups` to the state after `records` of an earlier process, then begin. The checkpoint has the
    batches before `next_batch`. `record` gets later events; `read` reads a snapshot's payloads. Raises JournalError."""
    store = groups.store
    store.read = read
    for number, each in enumerate(standing(records, next_batch)):
        if number == 0 or not isinstance(each.event, Snapshot):  # a later one adds nothing
            store.apply(each.event, each.payload, now)
    held = store.bound.batches.first(next_batch)
    if store.counts.trained > held:  # groups that a snapshot counts as trained can't be served again
        raise JournalError(
            f"the journal continues after {store.counts.trained} trained groups, but the newest checkpoint, of step "
            f"{next_batch}, has {held} of them: a newer checkpoint is missing. Put it back, or start a new run"
        )
    groups.record = record
    for batch in sorted({entry.batch for entry in store.entries.of(SERVED) if entry.batch < next_batch}):
        groups.finish(batch)  # trained, but the crash came before the buffer recorded it
    if store.counts.trained < held:
        raise JournalError(
            f"the journal has {store.counts.trained} trained groups, the checkpoint {held}: later records are lost"
        )
    groups.begin(next_batch)


def branch_off(groups: GroupManager, batch: int, why: str) -> int:
    """From `batch` on the learner has other settings (`why`). Requeue samples of versions after that batch's, with any
    bound: those weights will not exist again. Returns the number of groups."""
    groups.commit(Branch(batch, why))
    version, entries = groups.bound.batch_version(batch), groups.store.entries
    too_new = [entry.id for entry in entries.of(WAITING) if entry.newest > version]
    for group_id in too_new:
        groups.requeue(group_id)
    return len(too_new)
