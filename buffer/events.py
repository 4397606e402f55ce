"""What can happen to groups, one typed record each: the journal's schema, and all that `buffer.store` can apply.

A record is written as msgpack, [tag, field, ...]; its payload is kept beside it. Readers check the types of all fields.
If you change a field or its meaning, raise `buffer.segment_file.FORMAT`: an older journal is then refused, not misread.
"""

from collections.abc import Callable

import msgspec

from areal_like.wire.groups import Head
from areal_like.wire.stored import Extent


class _Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=str.lower):
    """The tag is the class name in lower case."""


class _OfGroup(_Record):
    id: int


class _OfBatch(_Record):
    batch: int


class Admit(_OfGroup):
    """A new group is leased to `actor`, which holds `version`. It starts `launch` samples; the first `need` to finish
    make the group. `redundant`: without a slot of its own. `task`: of a mixture (else "")."""

    row: int
    launch: int
    need: int
    actor: str
    version: int
    redundant: bool = False
    task: str = ""


class Lease(_OfGroup):
    """A group that waited for a lease runs on `actor`. `version`: none of its tokens will be older."""

    actor: str
    version: int


class Recall(_OfGroup):
    """The actor is asked to end its work on the group and hand it back."""


class Requeue(_OfGroup):
    """The group needs another lease: its rollout is lost, broken off, too old or unreadable."""


class LeaveOut(_OfGroup):
    """Samples that are not part of the group. `cut`: tokens of each sample that the group did not wait for. `redrawn`:
    the reason of each sample that was drawn again."""

    cut: tuple[int, ...]
    redrawn: list[str]


class Push(_Record):
    """`actor` has rolled out the group; `version` is the newest published one. The payload is the record's."""

    head: Head
    version: int
    actor: str


class Place(_OfGroup):
    """A redundant group takes the slot of `loser`, which then has none; None: it takes a free slot."""

    loser: int | None


class Defer(_OfGroup):
    """A redundant group got no slot: it goes to the end of the queue."""


class Readmit(_OfGroup):
    """A deferred group gets the next slot, and as many samples as its new batch asks for."""

    launch: int
    need: int


class Drop(_OfGroup):
    """The group leaves untrained and counts under `reason`."""

    reason: str


class Filter(_OfGroup):
    """Like `Drop`, for a complete group that is not worth training on."""

    reason: str


class Open(_OfBatch):
    """Batch `batch` will have `groups` groups. `scheduler`: the scheduler's state then (None: it has no state)."""

    groups: int
    scheduler: object


class Settle(_Record):
    """Before a batch is served whose slots belong to other groups, all groups that are not served get new slots (id →
    slot): the batch's groups get the batch's slots. Afterwards all slots below `end` are in use or trained."""

    slots: dict[int, int]
    end: int


class Serve(_OfBatch):
    """A batch goes to the learner. `ids`: its groups in order, which is now also the order of their slots. Tokens of
    versions before `oldest_allowed` are not trained."""

    ids: list[int]
    oldest_allowed: int


class Unserve(_OfBatch):
    """The learner can't train `batch`. Its groups and those of later batches wait again."""


class Finish(_OfBatch):
    """The learner has trained `batch`."""


class Replan(_Record):
    """Batches from before a crash can't be served again as they were: the policy and the scheduler choose again."""


class ServeAgain(_OfBatch):
    """Serve this batch again as before the crash: what recovery makes of a `Serve` that is undone. Never written."""

    ids: list[int]


class Begin(_OfBatch):
    """The buffer starts; the learner resumes at `batch`, its newest checkpoint. Leases and later batches are void."""


class Branch(_OfBatch):
    """The run resumes at `batch` with changed learner settings (`why`, in words): later versions will differ."""

    why: str


class Held(msgspec.Struct, array_like=True):
    """One group of a snapshot: fields of `buffer.entries.Entry`, and the places of its payloads in the journal."""

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
    task: str = ""


class Snapshot(_Record):
    """The whole state after all earlier events. A reader of the journal starts at the newest snapshot. `fates`: see
    `buffer.ledger.Counts`. `reserved`: a place of the format that holds nothing."""

    fates: dict[str, dict[str, int]]
    pushes: int
    staleness_max: int
    slots: tuple[int, list[int]]
    batches: tuple[int, int, list[int]]
    scheduler: object
    decided: dict[int, object]
    planned: dict[int, list[int]]
    groups: list[Held]
    reserved: None = None


Event = (
    Admit | Lease | Recall | Requeue | LeaveOut | Push | Place | Defer | Readmit | Drop
    | Filter | Open | Settle | Serve | Unserve | Finish | Replan | ServeAgain | Begin | Branch | Snapshot
)  # fmt: skip

encode: Callable[[Event], bytes] = msgspec.msgpack.Encoder().encode
decode: Callable[[bytes], Event] = msgspec.msgpack.Decoder(Event).decode
"""Raises msgspec.DecodeError if the bytes are not a record of this format."""
