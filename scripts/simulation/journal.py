"""The journal of a simulated run: the records of the production buffer, in memory, and how long their writes take."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from buffer.events import Event, Snapshot, decode, encode
from buffer.journal import Record
from buffer.payloads import Bytes, Extent, JournalError, Payload, Stored

from .costs import JournalCost
from .timeline import Timeline


class MemoryJournal:
    """In the place of `buffer.journal.Journal`. `sync`: a write goes on beside the buffer, which is told with `wake`
    when it ends; else the buffer waits, for the seconds that `take_debt` returns. A crash loses what was not yet
    written: `records` are the others, since the newest snapshot."""

    def __init__(self, timeline: Timeline, cost: JournalCost, sync: bool, dice: random.Random):
        self._timeline, self._cost, self._sync, self._dice = timeline, cost, sync, dice
        self.wake: Callable[[], None] = lambda: None
        self.appended = self.committed = self.stalls = 0
        self.busy = False
        self._begun, self._debt, self._life = 0, 0.0, 0  # records in the write under way; seconds; crashes so far
        self._pending: list[tuple[bytes, Payload]] = []
        self._records: list[tuple[bytes, Payload]] = []
        self._payloads: dict[int, Stored] = {}
        self._next_stall = self._draw()

    def _draw(self) -> float:
        mean = self._cost.every
        return self._timeline.now + self._dice.expovariate(1.0 / mean) if mean else math.inf

    def append(self, event: Event, payload: Payload = b"") -> Payload:
        self.appended += 1
        if len(payload):
            if not isinstance(payload, Stored):
                payload = Stored(self.read, data=payload)
            if payload.extent is None:
                payload.extent = Extent(0, self.appended, payload.size, 0)
                self._payloads[self.appended] = payload
        self._pending.append((encode(event), payload))
        return payload

    def read(self, extent: Extent) -> Bytes:
        """The bytes of a payload. Raises JournalError."""
        found = self._payloads.get(extent.offset)
        if found is None or found.data is None:
            raise JournalError(f"no payload at {extent}")
        return found.data

    def advance(self) -> int:
        """As the real one: begin to write what was appended. Returns how many records are written."""
        if self.busy or not self._pending:
            return self.committed
        seconds = self._cost.write
        if self._timeline.now >= self._next_stall:
            seconds += self._cost.stall
            self.stalls += 1
            self._next_stall = self._draw()
        self._begun = len(self._pending)
        if self._sync and seconds:
            self.busy = True
            self._timeline.after(seconds, self._written, self._life)
        else:
            self._debt += seconds
            self._settle()
        return self.committed

    def _written(self, life: int) -> None:
        if life == self._life:
            self._settle()
            self.wake()

    def _settle(self) -> None:
        self._records += self._pending[: self._begun]
        del self._pending[: self._begun]
        self.committed += self._begun
        self._begun, self.busy = 0, False

    def take_debt(self) -> float:
        """Seconds for which the buffer has waited since the last call."""
        debt, self._debt = self._debt, 0.0
        return debt

    def rotate(self, snapshot: Callable[[], Snapshot], held: Sequence[Stored] = ()) -> None:
        """Begin a segment with a snapshot. What was appended before is written, as the real one does."""
        self._begun = len(self._pending)
        self._life += 1  # a write under way has ended
        self._settle()
        self._records = [(encode(snapshot()), b"")]
        kept = {each.extent.offset for each in held if each.extent}
        self._payloads = {offset: self._payloads[offset] for offset in kept}

    def crash(self) -> None:
        """The process ends: what is not written is lost."""
        self._life += 1
        self._pending, self._begun, self.busy = [], 0, False
        self.appended = self.committed

    def __iter__(self) -> Iterator[Record]:
        """The records that a resume reads."""
        return (Record(cast(Event, decode(event)), payload) for event, payload in list(self._records))
