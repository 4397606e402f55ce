"""The buffer after a crash, and whoever reads its journal: which of the events still count, and what they make.

A process that starts writes `Begin`: the learner goes on from a checkpoint, and what was trained after that is undone.
So a batch that was finished, and then lost, has not been finished (`standing`); its groups wait, and `Store.planned`
has their order, so that it is served again as it was. Everything else has happened: after the same events the store is
the same. Payloads stay in the journal until they are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from buffer.events import Begin, Finish, Plan, Recorder, Serve, Snapshot, record_nothing
from buffer.journal import Record
from buffer.payloads import JournalError, Read, cannot_read
from buffer.replay import Replay
from buffer.store import Stage


def standing(records: Iterable[Record], next_batch: int | None = None) -> Iterator[Record]:
    """The records that still count, of `records`, which are gone through twice and not kept. `next_batch`: the learner
    is about to go on there (None: it is not). Of batches that were undone later, `Serve` is a mere `Plan`."""
    begun = [(number, each.event.batch) for number, each in enumerate(records) if isinstance(each.event, Begin)]
    undone: list[tuple[float, float]] = []  # until that record: batches from there on; the earliest on top
    least = float("inf") if next_batch is None else next_batch
    if next_batch is not None:
        undone.append((float("inf"), next_batch))
    for number, batch in reversed(begun):
        least = min(least, batch)
        undone.append((number, least))
    for number, each in enumerate(records):
        while undone and undone[-1][0] <= number:
            undone.pop()
        event = each.event
        if undone and isinstance(event, Serve | Finish) and event.batch >= undone[-1][1]:
            if isinstance(event, Serve):
                yield Record(Plan(event.batch, event.ids))
        else:
            yield each


def history(records: Iterable[Record]) -> Iterator[Record]:
    """The records that still count of a journal that was kept, without the snapshots in it, which say nothing new. For
    whoever reads a run. Raises JournalError where the beginning is missing."""
    for number, each in enumerate(standing(records)):
        if not isinstance(each.event, Snapshot):
            yield each
        elif number == 0:
            raise JournalError("the journal lacks its beginning: it is whole only with buffer.keep_journal=true")


def restore(
    replay: Replay,
    records: Iterable[Record],
    next_batch: int,
    now: float,
    record: Recorder = record_nothing,
    read: Read = cannot_read,
) -> None:
    """Bring an empty Replay to where the records of an earlier process end, as far as the learner's checkpoint has
    them: batches before `next_batch`. Then begin.

    Call it also where there are no records. From then on `record` is told of all events, `Begin` among them; first of
    batches that were trained before the crash could be recorded. `read` reads the payloads that a snapshot names, once
    they are needed. Raises JournalError.
    """
    store = replay.store
    store.read = read
    for each in standing(records, next_batch):
        store.apply(each.event, each.payload, now)
    held = store.bound.batches.first(next_batch)
    if store.trained > held:  # what a snapshot counts as trained can't be served again
        raise JournalError(
            f"the journal goes on after {store.trained} trained groups, and the newest checkpoint, of step "
            f"{next_batch}, has {held} of them: a newer checkpoint is missing. Put it back, or start a new run"
        )
    replay.record = record
    for batch in sorted({entry.batch for entry in store.of(Stage.SERVED) if entry.batch < next_batch}):
        replay.finish(batch)  # trained, but the crash came before the learner could say so
    replay.commit(Begin(next_batch))
