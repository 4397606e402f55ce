"""Who takes part in a run, and how far it is: actors, the learner with its weights, and the phase of the run.

A restarted actor sends hello under its old name, replacing the old one. `buffer.store` alone holds leases. Times are in
seconds of `Peers.clock`.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from areal_like.wire import messages
from areal_like.wire.bus import Router
from buffer.fleet import RelayTree, Stats, Totals

MOST_REFUSED = 3
"""A group is dropped after so many refused pushes; an actor gets no leases after so many in a row, until it joins
again."""

MOST_FAILED = 8
"""An actor on which so many groups in a row failed gets no leases while others work."""


@dataclass(slots=True)
class Actor:
    """`peer`: routing id. `pid`: process id on its own host. `slots`: sequences that its engine decodes at once.
    `owner`: its key ("": no keys). `version`: the weights it last applied (−1: none yet). `leased`, `ended`: sequences
    since it joined. `refused`: its refused groups in a row, `failed`: those that it could not roll out. `timed_out`:
    consecutive leases revoked for lack of progress. `benched_until`: it gets no leases before then
    (`buffer.deadlines`)."""

    name: str
    peer: bytes
    slots: int
    seen: float
    pid: int = 0
    owner: str = ""
    version: int = -1
    leased: int = 0
    ended: int = 0
    stats: Stats = field(default_factory=dict)
    refused: int = 0
    failed: int = 0
    timed_out: int = 0
    benched_until: float = -math.inf
    benched_at: int = -1  # the version that it held when it was benched
    behind_since: float = math.inf  # when it began to lag behind the newest version

    @property
    def engine(self) -> str:
        """State of its engine: "serving", "starting" or "restarting". Only a serving engine generates tokens."""
        return str(self.stats.get("engine", "serving"))

    @property
    def engine_note(self) -> str:
        """What is wrong with its engine, in words; "" if nothing is. A serving engine may have a note, too."""
        return str(self.stats.get("engine_note", ""))

    @property
    def free_slots(self) -> int:
        """Sequences that its engine could start now. A sequence frees its slot when it ends, before its group does."""
        return self.slots + self.ended - self.leased


class Fleet:
    """Actors by name and by routing id, in the order in which they joined. `totals`: of their reports."""

    def __init__(self, fanout: int = 0) -> None:
        self.tree, self.totals = RelayTree(fanout), Totals()
        self.by_name: dict[str, Actor] = {}
        self.by_peer: dict[bytes, Actor] = {}

    def __iter__(self) -> Iterator[Actor]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    def join(self, name: str, peer: bytes, slots: int, now: float, pid: int = 0, owner: str = "") -> Actor:
        """Add an actor. The caller has removed any earlier actor of that name."""
        self.by_name[name] = self.by_peer[peer] = actor = Actor(name, peer, slots, now, pid, owner)
        return actor

    def leave(self, actor: Actor) -> None:
        self.by_name.pop(actor.name, None)
        self.by_peer.pop(actor.peer, None)
        self.tree.leave(actor.name)

    def at_work(self, now: float) -> list[Actor]:
        """Actors that may get leases: never one with too many refused groups in a row; a benched or failing one, or one
        whose engine does not serve, only without another."""
        actors = [actor for actor in self.by_name.values() if actor.refused < MOST_REFUSED]
        actors = [actor for actor in actors if actor.failed < MOST_FAILED] or actors
        return not_benched([actor for actor in actors if actor.engine == "serving"] or actors, now)


def not_benched(actors: list[Actor], now: float) -> list[Actor]:
    """These actors without benched ones; all of them if all are benched."""
    return [actor for actor in actors if actor.benched_until <= now] or actors


@dataclass(slots=True)
class Learner:
    peer: bytes | None = None
    wanted: messages.Want | None = None  # its open request
    steps: int = 0  # batches trained
    redo: int = 0  # batches set aside
    checkpointed: int = -1  # steps of the newest durable checkpoint
    model: messages.Model | None = None  # None: not known


@dataclass(slots=True)
class PublishedWeights:
    """`published`: the learner's newest manifest; `manifest`: the announced one, of `version` (-1: none)."""

    published: messages.Manifest | None = None
    manifest: messages.Manifest | None = None
    version: int = -1
    digests: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class Phase:
    """Where the run stands between its first lease and its end."""

    started_at: float | None = None  # when the first lease was due
    progress_at: float = 0.0
    stopping: Literal["", "now", "drain"] = ""  # end the run; "drain": train all admitted groups first
    stop_by: float = math.inf  # when it ends without the learner
    finishing: bool = False  # no more batches: the last evaluation runs
    reported: bool = False


@dataclass(slots=True)
class Peers:
    """All processes of a run. `expected_actors`: those that must hold version 0 before the first lease. `clock`: the
    monotonic one or, in a simulation, its own. `left_out`: actors that will not be restarted → how they died."""

    router: Router
    expected_actors: int
    clock: Callable[[], float] = lambda: time.monotonic()  # looked up at each call: tests replace it
    fleet: Fleet = field(default_factory=Fleet)
    learner: Learner = field(default_factory=Learner)
    weights: PublishedWeights = field(default_factory=PublishedWeights)
    phase: Phase = field(default_factory=Phase)
    left_out: dict[str, str] = field(default_factory=dict)

    def age(self, now: float) -> float:
        """Seconds since the first lease."""
        return 0.0 if self.phase.started_at is None else now - self.phase.started_at

    def announce(self) -> None:
        """Announce the newest published weights to all actors."""
        weights = self.weights
        if weights.published and weights.published is not weights.manifest:
            weights.manifest, weights.version = weights.published, weights.published.version
            for actor in self.fleet:
                self.announce_to(actor)

    def announce_to(self, actor: Actor) -> None:
        """Announce the present weights, if any, to one actor, with the relays to get them from."""
        if manifest := self.weights.manifest:
            relays = self.fleet.tree.above(actor.name)
            self.router.send(actor.peer, messages.Announce(replace(manifest, relays=relays)))
