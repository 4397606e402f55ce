"""What can happen to groups, one typed record each: the journal's schema, and all that `buffer.store` can apply.

A record is written as msgpack, [tag, field, ...], with the payload, where there is one, beside it. Fields are checked
by their types when a record is read. A change of the fields or of their meaning is a new format: raise
`buffer.segment_file.FORMAT`, so that an older journal is refused and not misread.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from areal_like.groups import Head
from areal_like.messages import PartialHead
from buffer.payloads import Extent, Payload
from buffer.staleness import BatchesState, SlotsState


class _Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=str.lower):
    """The tag is the name in small letters."""


# ---- one group ------------------------------------------------------------------------------------------------------


class Admit(_Record):
    """A new group, leased to `actor`, which holds `version`. `launch` samples are started, the first `need` that finish
    make the group. `redundant`: it gets no slot of its own."""

    id: int
    row: int
    launch: int
    need: int
    actor: str
    version: int
    redundant: bool = False


class Lease(_Record):
    """A group that waited for a lease runs on `actor`. `version`: no token of it will be older. `resumes`: the lease
    carries what an earlier one has left; else that is let go."""

    id: int
    actor: str
    version: int
    resumes: bool


class Recall(_Record):
    """The actor is asked to hand the group back."""

    id: int


class Requeue(_Record):
    """What was rolled out is lost, too old, or not to be had: the group needs another lease."""

    id: int


class HandBack(_Record):
    """The actor does not go on; what it has sampled (`head`, see `areal_like.partials`, and the record's payload)
    replaces what the lease had carried."""

    id: int
    head: PartialHead


class Forget(_Record):
    """What an earlier lease has left of the group can't be read any more."""

    id: int


class LeaveOut(_Record):
    """Samples that will not be in the group: `cut` after so many tokens each, as it did not wait for them; others were
    drawn anew, for these reasons."""

    id: int
    cut: tuple[int, ...]
    redrawn: list[str]


class Push(_Record):
    """`actor` has rolled the group out; `version` is the newest that was published. The payload is the record's."""

    head: Head
    version: int
    actor: str


class Place(_Record):
    """A redundant group wins the slot of `loser`, which has none from then on, or a free slot (None)."""

    id: int
    loser: int | None


class Defer(_Record):
    """A redundant group has lost: it waits in the queue, behind all others there."""

    id: int


class Readmit(_Record):
    """A deferred group gets the next slot, and as many samples as its new batch asks for."""

    id: int
    launch: int
    need: int


class Drop(_Record):
    """The group leaves untrained, counted under `reason`."""

    id: int
    reason: str


class Filter(_Record):
    """As `Drop`, of a group that was rolled out well and is not worth training on."""

    id: int
    reason: str


# ---- batches --------------------------------------------------------------------------------------------------------


class Open(_Record):
    """Batch `batch` has so many groups. `scheduler`: the scheduler's state as of then (None: it keeps none)."""

    batch: int
    groups: int
    scheduler: object


class Settle(_Record):
    """A batch is about to be served whose slots others have: all groups that are not served get new ones (id → slot),
    those of the batch its own. All slots below `end` are in use or trained then."""

    slots: dict[int, int]
    end: int


class Serve(_Record):
    """A batch goes to the learner: its groups in order, which is that of their slots from then on. Tokens of versions
    before `oldest_allowed` are not trained."""

    batch: int
    ids: list[int]
    oldest_allowed: int


class Unserve(_Record):
    """The learner can't train `batch`: its groups wait again, and so do those of batches that were served ahead."""

    batch: int


class Finish(_Record):
    """The learner has trained `batch`."""

    batch: int


class Replan(_Record):
    """Batches that were served before a crash can't be served again as they were: policy and scheduler choose anew."""


class Plan(_Record):
    """A batch that was served before a crash, and is to be served again as it was. Made at a recovery of the `Serve`
    that the learner's checkpoint does not have; never written."""

    batch: int
    ids: list[int]


# ---- the run --------------------------------------------------------------------------------------------------------


class Begin(_Record):
    """The buffer starts, and the learner goes on at `batch`, that of its newest checkpoint: leases are void, and
    batches from there on have not been trained."""

    batch: int


class Branch(_Record):
    """This start has other settings of the learner than the one before, `why` in words: from `batch` on, training goes
    another way, and versions behind that one come out otherwise."""

    batch: int
    why: str


class Advance(_Record):
    """Slots that need `version` are open, and no others (`buffer.injection`)."""

    version: int


class Held(msgspec.Struct, array_like=True):
    """One group of a snapshot: fields of `buffer.store.Entry`, and where its payloads lie in the journal."""

    id: int
    row: int
    slot: int
    launch: int
    need: int
    stage: str
    actor: str
    lease_version: int
    cut: tuple[int, ...]
    pushed: int
    version_at_push: int
    batch: int
    pushed_by: str
    was_deferred: bool
    head: Head | None
    stored: Extent | None
    left: tuple[PartialHead, Extent] | None


class Snapshot(_Record):
    """All that the events before it have made: a journal is read from its newest one on."""

    admitted: int
    trained: int
    filtered: dict[str, int]
    dropped: dict[str, int]
    requeued: int
    resumed: int
    pushes: int
    staleness_max: int
    slots: SlotsState
    batches: BatchesState
    scheduler: object
    decided: dict[int, object]
    planned: dict[int, list[int]]
    groups: list[Held]


Event = (
    Admit | Lease | Recall | Requeue | HandBack | Forget | LeaveOut | Push | Place | Defer | Readmit | Drop | Filter
    | Open | Settle | Serve | Unserve | Finish | Replan | Plan | Begin | Branch | Advance | Snapshot
)  # fmt: skip
Recorder = Callable[[Event, Payload], Payload]
"""Is told of every event, before it is applied; returns the payload as it is to be held: `Journal.append`."""


def record_nothing(event: Event, payload: Payload) -> Payload:
    """The recorder of a buffer without a journal."""
    return payload


# ---- bytes ----------------------------------------------------------------------------------------------------------


class Padding(_Record):
    """No event: fills a block of the disk."""


class Copy(_Record):
    """No event: holds the payload of an older segment."""


Written = Event | Padding | Copy
encode: Callable[[Written], bytes] = msgspec.msgpack.Encoder().encode
decode: Callable[[bytes], Written] = msgspec.msgpack.Decoder(Written).decode
"""Raises msgspec.DecodeError for what is no record of this format."""
