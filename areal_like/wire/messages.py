"""The messages that roles send one another: one struct per kind, whose types limit sizes and depth when it is read.

A kind's name on the wire is its class name in lower case. Payloads are separate frames after the message. First come
the requests of the starter, actors and learner, then the answers of the buffer, then those of sources of weights."""

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from areal_like.models.experts import Routing, Shape
from areal_like.rewards import LARGEST_REWARD, MOST_PARTS, PART
from areal_like.types import Lease as OneLease

MOST, MOST_STATS, MOST_HOPS, MAX_NAME, MAX_TEXT, MAX_SLOTS = 1 << 16, 128, 256, 100, 2000, 1 << 20
"""Entries of any list or map, of an actor's stats, of a plan; characters of a name, of a text; slots of an engine."""
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Version = Annotated[int, Meta(ge=0, lt=1 << 31)]
Held = Annotated[int, Meta(ge=-1, lt=1 << 31)]
"""A version, or -1: none."""
Finite = Annotated[float, Meta(ge=-1e18, le=1e18)]
"""Sums and squares of such numbers stay finite."""
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Reward = Annotated[float, Meta(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Parts = Annotated[dict[Annotated[str, Meta(max_length=MAX_NAME, pattern=PART)], Reward], Meta(max_length=MOST_PARTS)]
"""Of a reward."""
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
"""For people, or a place."""
Ids = Annotated[list[Count], Meta(max_length=MOST)]
Lengths = Annotated[list[tuple[Count, bool]], Meta(max_length=MOST)]
Names = Annotated[list[Annotated[str, Meta(max_length=MAX_NAME)]], Meta(max_length=MOST)]
Digests = Annotated[dict[Version, Annotated[str, Meta(max_length=MOST)]], Meta(max_length=MOST)]
"""Version → digest of its weights, or several (`areal_like.wire.groups.OR`)."""
Tokens = Annotated[dict[Count, Count], Meta(max_length=1 << 12)]
"""Lease → tokens so far."""
if TYPE_CHECKING:
    Facts = dict[str, Any]
else:
    Fact = Plain = None | bool | int | float | str
    for _ in range(5):
        Facts = Annotated[dict[str | int, Fact], Meta(max_length=MOST)]
        Fact = Plain | Facts | Annotated[list[Fact], Meta(max_length=MOST)]
"""Metrics and reports: plain data, nested five deep at most. (A type that names itself has no limit of depth.)"""


class Message(msgspec.Struct, forbid_unknown_fields=True):
    @classmethod
    def kind(cls) -> str:
        """Its name on the wire."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


class Table(msgspec.Struct, forbid_unknown_fields=True):
    """The numbers of several groups: see `wire.groups`. `groups`: (id, samples, seconds) of each; `experts`: of
    each, too, or empty where no payload has any; so are `unscored` (`Group.unscored`) and `parts` (of each sample)."""

    groups: Annotated[
        list[tuple[Count, Annotated[int, Meta(gt=0, lt=1 << 31)], Seconds]], Meta(min_length=1, max_length=MOST)
    ]
    rows: bytes
    runs: bytes
    digests: Digests
    experts: Annotated[list[Shape], Meta(max_length=MOST)] = []
    unscored: Ids = []
    parts: Annotated[list[Annotated[list[Parts], Meta(max_length=MOST)]], Meta(max_length=MOST)] = []


class Probe(msgspec.Struct, forbid_unknown_fields=True):
    """A few sequences of token ids, and the learner's logprob, at temperature 1 and under the manifest's version, of
    each token after the first. `dtype`: in which it multiplies matrices."""

    tokens: Annotated[list[Annotated[list[Count], Meta(min_length=2, max_length=1 << 12)]], Meta(max_length=64)]
    logprobs: Annotated[list[Annotated[list[Finite], Meta(max_length=1 << 12)]], Meta(max_length=64)]
    dtype: Name


class Manifest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A version of the weights, and where to fetch it. `bytes`: in total. `tensors`: (name, dtype, shape) of each.
    `parts`: endpoint of each part's publisher. `relays`: (endpoint, public key) of the sources to ask first. `probe`:
    now and then, logprobs to check engines against."""

    version: Version
    digest: Text
    bytes: Count = 0
    tensors: Annotated[list[tuple[Text, Text, Annotated[list[Count], Meta(max_length=16)]]], Meta(max_length=MOST)] = []
    block_bytes: Count = 0
    parts: Annotated[list[Text], Meta(max_length=MOST)] = []
    relays: Annotated[list[tuple[Text, Text]], Meta(max_length=MOST)] = []
    probe: Probe | None = None


class Hello(Message):
    """First, and after each reconnect. `slots`: sequences that an actor's engine decodes at once."""

    role: Literal["learner", "actor"]
    name: Name
    pid: Count
    slots: Annotated[int, Meta(ge=0, le=MAX_SLOTS)]


class Status(Message):
    """Asks for a `Report`."""


class Lost(Message):
    """A process of that name ended (`pid` 0: any). `for_good`: without a restart. `by_itself`: nothing killed it."""

    name: Name
    pid: Count
    how: Text
    for_good: bool
    by_itself: bool = False


class Stop(Message, omit_defaults=True):
    """A user asks the run to end; the buffer passes it to the learner, which confirms. `drain`: train all admitted.
    `late`, with `drain`: the time of `Want` is over, and no batch is complete."""

    drain: bool
    late: bool = False


class Heartbeat(Message):
    """Sent every few seconds: running totals, and leases with progress since the last one. `heldout`: held-out ones."""

    stats: Annotated[dict[Name, Finite | Annotated[str, Meta(max_length=256)]], Meta(max_length=MOST_STATS)]
    progress: Tokens
    heldout: Tokens


class Push(Message):
    """Groups that are rolled out, each with its payload. Repeated until `Pushed`."""

    table: Table


class HandBack(Message):
    """Leases that end unfinished: group id → tokens of each sample that has begun, and whether it was cut."""

    lengths: Annotated[dict[Count, Lengths], Meta(max_length=MOST)]
    leaving: bool


class Relay(Message):
    """Offers to hand weights on to others, after hello; `key` is the public key ("": no keys)."""

    endpoint: Annotated[str, Meta(max_length=MAX_NAME, pattern="^(ipc|tcp)://")]
    key: Annotated[str, Meta(max_length=MAX_NAME)]


class Credit(Message):
    """So many leased sequences ended since hello: as many may be leased. A reconnect counts from minus running ones."""

    ended: Annotated[int, Meta(ge=-MAX_SLOTS, le=1 << 62)]


class LeftOut(Message):
    """Sent before the push of a group that lacks samples. `cut`: tokens of each sample that it did not wait for.
    `redrawn`: the reason of each sample that was drawn again."""

    id: Count
    cut: Annotated[list[Annotated[int, Meta(gt=0, lt=1 << 31)]], Meta(max_length=MOST)]
    redrawn: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=MOST)]


class Failed(Message):
    """A lease that ends without a group."""

    id: Count
    reason: Text
    detail: Text


class Evaluated(Message):
    """A held-out lease's result, and versions of its oldest and newest token. `answer`: the sample; None: it failed."""

    id: Count
    reward: Reward
    oldest: Held
    newest: Held
    length: Count
    answer: Table | None = None


class Applied(Message):
    """From now on the engine samples with this version."""

    version: Version
    digest: Text


class Model(Message):
    """The learner's model, after hello: vocabulary, `positions` (None: no limit), routing where it replays experts."""

    vocab_size: Count
    routing: Routing | None = None
    positions: Count | None = None


class Published(Message):
    """A version that can be fetched now."""

    manifest: Manifest


class Want(Message):
    """Asks for a batch, one ahead of training; it comes when it is complete. `until`: seconds since the first lease
    for which the learner waits (None: any time)."""

    index: Version
    version: Version
    until: Seconds | None = None


class WantShare(Message):
    """Another rank of the learner asks for its share of a batch."""

    index: Version
    rank: Count


class Trained(Message):
    """All batches up to this one are trained."""

    index: Version


class Checkpointed(Message):
    """All batches before this step are in a checkpoint."""

    step: Version


class Untrainable(Message):
    """Asks for other groups in place of those of this batch; answered by `SetAside`."""

    index: Version
    reason: Text


class EndRun(Message):
    """No more batches: make the last evaluation, then `Report`."""

    reason: Text
    steps: Version


class Welcome(Message):
    """Answers hello."""


class Lease(Message):
    """Prompts to roll out."""

    leases: Annotated[list[OneLease], Meta(max_length=MOST)]


class Pushed(Message):
    """Do not push these groups again: they are recorded, or refused."""

    ids: Ids


class Announce(Message):
    """The newest version that the actor must take, and the sources to get it from."""

    manifest: Manifest


class Cancel(Message):
    """These leases end. `hand_back`: answer with a `HandBack`."""

    ids: Ids
    hand_back: bool


class Quit(Message):
    """The buffer gives up this actor: it must end and be restarted."""

    reason: Text


class Batch(Message):
    """A batch, or one rank's share of it: payloads as in `Push`; `actors` made its groups, `info` are metrics,
    `places` those of a share's groups in the batch; `redo` counts the batches that were set aside before."""

    index: Version
    version: Version
    oldest_allowed: int
    actors: Names
    table: Table
    info: Facts
    redo: Count = 0
    places: Ids | None = None


class SetAside(Message):
    """Answers `Untrainable`; see `Batch.redo`."""

    index: Version
    redo: Count


class Report(Message):
    """How the run stands (`buffer.status`)."""

    report: Facts


class Refused(Message):
    """To any sender: its message was refused and changed nothing. `reason`: why."""

    reason: Text


class Sync(Message):
    """How do I get from what I hold of a part (`held`, `digest`) to `version`? Answered by `Hops`, or `Later`."""

    part: Count
    version: Version
    held: Held
    digest: Text


class Fetch(Message):
    """Asks for `size` bytes of a hop. Answered by `Chunk` or `Gone`."""

    part: Count
    base: Held
    version: Version
    offset: Count
    size: Count


class Hops(Message):
    """The hops to fetch, one after the other: (base, version, bytes, checksum). None: there is no route."""

    part: Count
    version: Version
    hops: Annotated[list[tuple[Held, Version, Count, Text]], Meta(max_length=MOST_HOPS)]


class Later(Message):
    """The version is not here yet; `progress` grows while it comes."""

    part: Count
    version: Version
    progress: Count


class Chunk(Message):
    """Its payload are the bytes that were asked for."""

    part: Count
    base: Held
    version: Version
    offset: Count


class Gone(Message):
    """The requested bytes are not kept any more."""

    part: Count
    version: Version


KINDS: dict[str, type[Message]] = {each.kind(): each for each in Message.__subclasses__()}
SENDS: dict[str, frozenset[type[Message]]] = {
    "learner": frozenset({Hello, Stop, Model, Published, Want, WantShare, Trained, Checkpointed, Untrainable, EndRun}),
    "actor": frozenset[type[Message]]([Hello, Status, Lost, Heartbeat, Push, HandBack, Relay, Credit, LeftOut])
    | {Failed, Evaluated, Applied, Sync, Fetch},
    "operator": frozenset({Status, Lost, Stop}),
    "observer": frozenset({Status}),
}
"""Role of a key (`wire.keys`) → messages that its holder may send; the buffer and sources of weights may send all."""
LARGE = frozenset({Push, HandBack, LeftOut, Failed, Published, Lease, Pushed, Announce, Cancel, Batch, Report})
"""Messages with headers longer than most (`areal_like.wire.frames`)."""
