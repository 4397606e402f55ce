"""Feeds a learner from the journal of an earlier run: the same batches in the same order, without actors. Its run then
repeats bit for bit on the same machine; or the learner trains another loss on the same trajectories."""

import math
import time
from collections.abc import Iterator
from pathlib import Path

from areal_like.wire import messages
from areal_like.wire.bus import Router
from areal_like.wire.frames import Received, WireError
from areal_like.wire.groups import Head, pack_heads
from areal_like.wire.stored import Payload, load
from buffer.entries import SERVED
from buffer.events import Begin, Branch, Finish, Serve
from buffer.journal import Recorded
from buffer.ledger import ledger_of
from buffer.outbox import Outbox
from buffer.recovery import history
from buffer.shares import Shares
from buffer.staleness import Bound
from buffer.store import Store

RecordedBatch = tuple[list[tuple[Head, Payload]], int]


def recorded_batches(folder: Path) -> Iterator[RecordedBatch]:
    """The trained batches 0, 1, 2, ... in order, once each: their groups (head, payload) as served, and the version
    below which tokens were masked. Payloads stay in the journal. Raises JournalError if it lacks its beginning."""
    store, allowed = Store(Bound(math.inf, 1)), dict[int, int]()
    for event, payload in history(Recorded(folder, whole=True)):
        if isinstance(event, Serve):
            allowed[event.batch] = event.oldest_allowed
        elif isinstance(event, Finish):
            entries = [entry for entry in store.entries.of(SERVED) if entry.batch == event.batch]
            yield [(entry.head, entry.payload) for entry in entries if entry.head], allowed.pop(event.batch)
        store.apply(event, payload)


def branches(folder: Path) -> list[tuple[int, str]]:
    """(train step, changes) of each resume with other learner settings after which a batch was trained."""
    found: list[tuple[int, str]] = []
    begun: Begin | Branch | None = None
    for event in (each.event for each in Recorded(folder, whole=True)):
        if isinstance(event, Begin | Branch):
            begun = event
        elif isinstance(event, Finish):
            found += [(begun.batch, begun.why)] if isinstance(begun, Branch) and begun.batch else []
            begun = None
    return found


def count_batches(folder: Path) -> int:
    """How many batches a journal holds. Raises JournalError."""
    return sum(isinstance(each.event, Finish) for each in history(Recorded(folder, whole=True)))


class ReplayServer:
    """Serves recorded batches to one learner and its ranks, until the process ends."""

    def __init__(self, router: Router, folder: Path, interval: int, ranks: int = 1):
        self.router, self.folder, self.interval = router, folder, interval
        self._batches = enumerate(recorded_batches(folder))
        self._shares, self._outbox = Shares(ranks), Outbox(router, None)
        self._sizes: dict[int, int] = {}
        self._began: float | None = None
        self._learner, self.stopping, self.served_to = b"", "", 0
        self.served = self.trained = self.samples = self.staleness_sum = self.staleness_max = 0

    def run(self) -> None:
        while True:
            received = self.router.receive(timeout=0.2)
            if received:
                self.handle(*received)

    def handle(self, peer: bytes, received: Received | WireError) -> None:
        if isinstance(received, WireError):
            return
        match message := received.message:
            case messages.Hello():
                self._learner = self._learner or peer  # rank 0 comes first
                self.router.send(peer, messages.Welcome())
            case messages.Stop() if peer != self._learner:
                self.stopping = "now"
                if self._learner:
                    self.router.send(self._learner, messages.Stop(drain=False))
                self.router.send(peer, messages.Report(self._report()))
            case messages.Want():
                self._serve(peer, message.index)
            case messages.WantShare():
                self._shares.want(peer, message.index, message.rank)
                self._shares.answer(self._outbox.put)
            case messages.Trained():
                self._shares.trained(message.index + 1)
                self.trained += self._sizes.pop(message.index, 0)
            case messages.Status() | messages.EndRun():
                self.router.send(peer, messages.Report(self._report()))
        self._outbox.flush()

    def _serve(self, peer: bytes, index: int) -> None:
        """Send batch `index`. Send nothing after the last batch: the learner asks ahead, but does not train it."""
        self._began = self._began or time.monotonic()
        if index in self._shares.served:  # the message with the batch was lost
            self._outbox.put(peer, *self._shares.served[index].share(0))
            return
        found = next((recorded for number, recorded in self._batches if number == index), None)
        if found is None:
            return
        groups, oldest_allowed = found
        version = index // self.interval
        for head, _ in groups:
            for made, samples in head.oldest_tokens(oldest_allowed).items():
                self.samples += samples
                self.staleness_sum += (version - made) * samples
                self.staleness_max = max(self.staleness_max, version - made)
        self.served += len(groups)
        self._sizes[index] = len(groups)
        self.served_to = index
        info: dict[str, object] = {"evaluations": [], "seconds": time.monotonic() - self._began}
        heads, payloads = [head for head, _ in groups], [load(payload) for _, payload in groups]
        batch = messages.Batch(index, version, oldest_allowed, [""] * len(groups), pack_heads(heads), info)
        self._outbox.put(peer, *self._shares.put(batch, heads, payloads).share(0))
        self._shares.answer(self._outbox.put)

    def _report(self) -> dict[str, object]:
        seconds = time.monotonic() - self._began if self._began else 0.0
        return {
            "started": self._began is not None,
            "seconds": seconds,
            "trained_seconds": seconds,
            "ledger": ledger_of({"admitted": self.served, "trained": self.trained}, self.served - self.trained),
            "actors": {},
            "left_out": {},
            "stopping": self.stopping,
            "since_step": 0,
            "version": self.served_to // self.interval,
            "steps": self.served_to,
            **dict.fromkeys(("buffer/waiting", "buffer/running", "buffer/queued", "buffer/bytes"), 0),
            **dict.fromkeys(("duplicates", "refused"), 0),
            "staleness_bound": None,
            "staleness_max": self.staleness_max,
            "staleness_mean": self.staleness_sum / max(1, self.samples),
            "evaluations": [],
            "waits": [] if self._began else ["the replay waits for the learner"],
        }
