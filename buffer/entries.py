"""The life of a group in the buffer: its stages, and what is known of it. `buffer.replay` makes the changes.

    admit ──► RUNNING ──push──► WAITING ──serve──► SERVED ──trained──► (gone: counted as trained)
               │   ▲               │
     hand back │   │ assign        │ drop
       requeue ▼   │               ▼
              QUEUED ─── drop ───► (gone: counted as filtered, or dropped by reason)
     no place  │   ▲
               ▼   │ take up
              DEFERRED

RUNNING: leased to an actor. QUEUED: its actor was lost or has handed it back, or it got too old; it needs a new lease,
which carries what the actor has handed back as far as the bound allows (`Entry.partial`). WAITING: pushed, ready to be
served. SERVED: handed to the learner, until the learner says that it is trained. A group that leaves
without being trained gives its slot back, and the next admitted group takes the lowest free one.

A scheduler may start *spare* groups, more than there are places: they run without a slot (NO_SLOT), and one that is
pushed takes the place of a group that is not there yet, which is a spare one from then on. What runs without a slot and
can't win one any more is recalled, and DEFERRED: a queue, first in, first out, that a scheduler takes from when it
likes (`buffer.schedulers`). One that is only moved, off an actor that is parked, is QUEUED without a slot meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from areal_like.groups import Head
from buffer.partials import Partial
from buffer.payloads import Payload

NO_SLOT = -1
Recorder = Callable[[str, list[Any], Payload], Payload]
"""Is told of every change, and returns the payload as it is to be held: the journal's `append`."""


def record_nothing(kind: str, fields: list[Any], payload: Payload) -> Payload:
    """The recorder of a buffer without a journal."""
    return payload


class Stage(StrEnum):
    DEFERRED = "deferred"
    QUEUED = "queued"
    RUNNING = "running"
    WAITING = "waiting"
    SERVED = "served"


@dataclass(slots=True)
class Entry:
    """One active group. `lease_version`: no token of it is older; weights that its actor held at the lease, or those of
    the oldest token that the lease carries. `partial`: what an earlier lease has left, until it is pushed; `recalled`:
    its actor has been asked to hand it back; `moves`: for others to go on at once, until one does; `deferred`: it has
    been, once; `cut`: tokens of samples that it did not wait for. `head` and `payload` are the pushed message's,
    undecoded; `maker` is the actor that pushed it ("" after a resume); `refused` pushes of it could not be accepted;
    `pushed` is its place in the order of finishing; times are in seconds. `holders`: all
    actors that have had a lease of it, the one that has it now included; not kept over a resume, since leases are void
    then."""

    id: int
    row: int
    slot: int
    launch: int
    need: int
    stage: Stage
    actor: str
    lease_version: int
    admitted_at: float
    pushed_at: float = 0.0
    pushed: int = -1
    version_at_push: int = 0
    head: Head | None = None
    payload: Payload = b""
    batch: int = -1
    partial: Partial | None = None
    recalled: bool = False
    moves: bool = False
    deferred: bool = False
    cut: tuple[int, ...] = ()
    maker: str = ""
    refused: int = 0
    timeouts: int = 0  # leases of it that were revoked for want of progress
    avoid: str = ""  # the last actor that had a push of it refused or a lease revoked: another is to try
    holders: tuple[str, ...] = ()

    def leased_to(self, actor: str) -> None:
        """It runs on `actor` from now on."""
        self.actor = actor
        if actor and actor not in self.holders:
            self.holders = (*self.holders, actor)

    @property
    def size(self) -> int:
        """Bytes of payload that it holds."""
        return len(self.payload) + (len(self.partial.payload) if self.partial else 0)

    @property
    def to_run(self) -> int:
        """Sequences that its next lease is going to run: samples that have ended are only answered from the record."""
        return max(1, self.launch - self.partial.ended) if self.partial else self.launch

    @property
    def oldest(self) -> int:
        """Version of its oldest token."""
        assert self.head is not None
        return self.head.oldest

    def oldest_trained(self, allowed: int) -> int | None:
        """Version of its oldest token that is not older than `allowed`. None: there is no such token."""
        if self.oldest >= allowed:
            return self.oldest
        assert self.head is not None
        return min((version for version in self.head.versions if version >= allowed), default=None)

    @property
    def newest(self) -> int:
        """Version of its newest token."""
        assert self.head is not None
        return self.head.newest
