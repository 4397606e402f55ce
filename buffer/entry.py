"""One active group: stage, slot, lease, partial group of an earlier lease, and payload once it is pushed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from areal_like.wire.groups import CALL, FINISHES, RUN, Head, samples_of, versions_of
from areal_like.wire.messages import PartialHead
from buffer.segment_file import Payload

NO_SLOT = -1
_ABORTED = FINISHES.index("abort")


class Stage(StrEnum):
    __hash__ = str.__hash__  # an enum's own hash is several times as slow

    DEFERRED = "deferred"
    QUEUED = "queued"
    RUNNING = "running"
    REDUNDANT = "redundant"
    RECALLED = "recalled"
    WAITING = "waiting"
    SERVED = "served"


LEASED = (Stage.RUNNING, Stage.REDUNDANT, Stage.RECALLED)
UNFINISHED = (*LEASED, Stage.QUEUED)


@dataclass(frozen=True)
class PartialGroup:
    """The samples that an actor handed back, undecoded (see `areal_like.wire.groups`), until another lease continues
    them. A lease may carry a sample only if the bound lets all its tokens be trained in the group's slot."""

    head: PartialHead
    payload: Payload

    def usable(self, least: float) -> dict[int, int]:
        """Sample index → version of its oldest token, for samples without a token of before `least`."""
        return {index: min(made) for index, made in versions_of(self.head).items() if min(made) >= least}

    @cached_property
    def lengths(self) -> dict[int, tuple[int, bool]]:
        """Sample index → response tokens so far, and whether the sample was cut; for samples that have begun."""
        tokens, calls = Counter[int](), np.frombuffer(self.head.calls, CALL)
        for index, n in zip(samples_of(self.head), np.frombuffer(self.head.runs, RUN)["n"].tolist(), strict=True):
            tokens[index] += n
        aborted = set(calls["sample"][calls["finish"] == _ABORTED].tolist())
        return {index: (count, index in aborted) for index, count in tokens.items()}

    @property
    def ended(self) -> int:
        """Samples that have begun and were not cut."""
        return sum(not cut for _, cut in self.lengths.values())

    @property
    def newest(self) -> int:
        """Version of its newest token."""
        return max(self.head.digests)


@dataclass(slots=True)
class Entry:
    """One active group. Times are in seconds of the monotonic clock."""

    id: int
    row: int
    slot: int
    launch: int
    need: int
    stage: Stage
    actor: str = ""  # holder of its lease
    lease_version: int = 0  # no token is older: version of the actor's weights, or of the oldest carried token
    admitted_at: float = 0.0
    pushed_at: float = 0.0
    pushed: int = -1  # its place in the order of finishing
    version_at_push: int = 0
    head: Head | None = None  # of the push, like the payload
    payload: Payload = b""
    pushed_by: str = ""  # the actor that pushed it
    batch: int = -1  # if SERVED
    partial: PartialGroup | None = None  # from earlier leases, until the group is pushed
    was_deferred: bool = False
    task: str = ""  # of a mixture
    cut: tuple[int, ...] = ()  # tokens of samples that it did not wait for

    # Notes on its leases, not kept over a restart.
    moved_at: float = 0.0  # when it was leased or last made progress
    holders: tuple[str, ...] = ()  # all actors that had a lease of it, the present one included
    refused: int = 0  # refused pushes
    timeouts: int = 0  # leases revoked because they made no progress
    deaths: int = 0  # of actors that held it and died by themselves
    failed_on: str = ""  # the last actor whose push was refused or whose lease was revoked: another should try

    def leased_to(self, actor: str, version: int) -> None:
        self.actor, self.lease_version = actor, version
        if actor and actor not in self.holders:
            self.holders = (*self.holders, actor)

    @property
    def size(self) -> int:
        """Payload bytes of the group, partial ones included."""
        return len(self.payload) + (len(self.partial.payload) if self.partial else 0)

    @property
    def to_run(self) -> int:
        """Sequences that its next lease will run; samples that have ended need no engine."""
        return max(1, self.launch - self.partial.ended) if self.partial else self.launch

    @property
    def oldest(self) -> int:
        """Version of its oldest token."""
        assert self.head is not None
        return self.head.oldest

    @property
    def newest(self) -> int:
        """Version of its newest token."""
        assert self.head is not None
        return self.head.newest

    def oldest_trained(self, allowed: int) -> int | None:
        """Version of its oldest token of version `allowed` or newer; None if there is none."""
        assert self.head is not None
        if self.oldest >= allowed:
            return self.oldest
        return min((version for version in self.head.versions if version >= allowed), default=None)
