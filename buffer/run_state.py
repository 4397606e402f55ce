"""What the buffer knows about one run: its parts, and the few facts that belong to no part.

`handlers` changes the state when a message comes, `dispatch` and the controller decide from it, `status` reports it.
One thread, no locks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from areal_like.models.experts import Routing
from areal_like.wire import messages
from areal_like.wire.bus import Router
from buffer import events
from buffer.actor import Actor
from buffer.checks import FailedGroups
from buffer.evaluation import Evaluation, RoundResult
from buffer.fleet import Fleet, Hedges
from buffer.gauges import Gauges
from buffer.injection import may_announce
from buffer.outbox import Outbox
from buffer.prompts import PromptCursor
from buffer.relays import Relays
from buffer.replay import Leaving, Replay
from buffer.schedulers import Scheduler
from buffer.shares import Shares
from buffer.sizing import check_sizes
from buffer.store import LEASED, Entry, Stage, Store
from buffer.untrained_samples import UntrainedSamples
from buffer.verifier_timeouts import VerifierTimeouts

log = logging.getLogger(__name__)


MOST_DEATHS = 3
"""A group is dropped if this many actors died by themselves while they held it."""


@dataclass(slots=True)
class Learner:
    """What the learner has asked for and done."""

    peer: bytes | None = None
    wanted: messages.Want | None = None  # its open request
    parts: int | None = None  # groups of the wanted batch sent early (None: the learner takes batches whole)
    parts_by: tuple[int, int, int] | None = None  # the facts when parts were last sought
    steps: int = 0  # batches trained
    redo: int = 0  # batches set aside
    vocab_size: int | None = None  # tokens that its model knows (None: not known yet)
    routing: Routing | None = None  # what its model's routers choose (None: it does not replay the engine's experts)


@dataclass(slots=True)
class PublishedWeights:
    """`published`: manifest of the learner's newest weights. `manifest`: the one announced to actors, of `version` (-1:
    none yet). `digests`: of all recent versions."""

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
    finishing: bool = False  # no more batches: the last evaluation runs
    reported: bool = False


@dataclass(slots=True)
class RunState:
    """All times are in seconds of `clock`: the monotonic one or, in a simulation, its own."""

    router: Router
    outbox: Outbox
    replay: Replay
    scheduler: Scheduler
    prompts: PromptCursor
    evaluation: Evaluation
    expected_actors: int  # actors that must hold version 0 before the first lease
    max_bytes: int  # with more payload bytes, only groups of the learner's next batch are started
    clock: Callable[[], float] = lambda: time.monotonic()  # looked up at each call: tests replace it
    last_batch: int | None = None  # the data ends with it (None: the end is not known)
    folder: Path | None = None  # of the run (None: write no files)
    learner: Learner = field(default_factory=Learner)
    weights: PublishedWeights = field(default_factory=PublishedWeights)
    fleet: Fleet = field(default_factory=Fleet)
    hedges: Hedges = field(default_factory=Hedges)
    relays: Relays = field(default_factory=Relays)
    shares: Shares = field(default_factory=Shares)  # batches sent and not trained yet
    verifiers: VerifierTimeouts = field(default_factory=VerifierTimeouts)
    gauges: Gauges = field(default_factory=Gauges)
    samples: UntrainedSamples = field(default_factory=UntrainedSamples)
    store: Store = field(init=False)
    failures: FailedGroups = field(init=False)
    samples_per_batch: int = field(init=False)
    largest_payload: int = 0  # bytes of one group, so far
    left_out: dict[str, str] = field(default_factory=dict)  # actors that will not be restarted → how they died
    phase: Phase = field(default_factory=Phase)
    to_start: tuple[object, float] = (None, 0.0)  # facts, groups that may get a lease by them (`dispatch.admit`)

    def __post_init__(self) -> None:
        self.store = self.replay.store
        self.samples_per_batch = check_sizes(self.scheduler.sizing, self.replay.bound.groups_per_batch)
        self.gauges.since_step = self.learner.steps
        self.gauges.lost.per_batch = self.replay.bound.groups_per_batch
        self.replay.lost = self._keep_lost
        self.failures = FailedGroups(most=4 * self.replay.bound.groups_per_batch)

    @property
    def now(self) -> tuple[int, int]:
        """(train steps made, newest version announced to actors)."""
        return self.learner.steps, self.weights.version

    def _keep_lost(self, leaving: Leaving) -> None:
        entry, why, actor = leaving.entry, leaving.why, leaving.actor
        if why == "end of run":
            return
        if leaving.head is None:  # `failures` reports leases that failed
            if entry.stage in LEASED and why.startswith("stale") and actor in self.fleet.by_name:
                self.samples.ask(self.now, entry.id, why, actor)  # `dispatch.revoke` asks
            else:
                self.samples.unfinished(self.now, entry.id, why, actor, leaving.left)
            return
        self.samples.dropped(self.now, leaving.head, leaving.payload, why, actor)
        self.gauges.lost.note(why.partition(":")[0], self.learner.steps)

    def announce(self) -> None:
        """Announce the newest weights to all actors, unless they must keep the present weights (`injection`)."""
        weights = self.weights
        if weights.published is weights.manifest or weights.published is None:
            return
        if self.phase.finishing or may_announce(self.replay, weights.published.version):
            weights.manifest, weights.version = weights.published, weights.published.version
            for actor in self.fleet:
                self.tell(actor.peer, actor.name)

    def tell(self, peer: bytes, name: str) -> None:
        """Announce the newest weights, if any, to one actor, with the relays to get them from."""
        if manifest := self.weights.manifest:
            self.router.send(peer, messages.Announce(replace(manifest, relays=self.relays.above(name))))

    def tell_room(self, peer: bytes) -> None:
        """Tell an actor which free slots are worth a message, if any lease was given so far."""
        if self.fleet.room < math.inf:
            self.router.send(peer, messages.Room(int(self.fleet.room), self.fleet.step))

    def may_push(self, actor: Actor, group_id: int) -> bool:
        """Has this actor ever had a lease of the group? A former holder may push too: the first push wins. Also True
        for groups that were pushed before or are gone: a push does not change them."""
        entry = self.store.entries.get(group_id)
        return entry is None or entry.stage in (Stage.WAITING, Stage.SERVED) or actor.name in entry.holders

    def age(self, now: float) -> float:
        """Seconds since the first lease."""
        return 0.0 if self.phase.started_at is None else now - self.phase.started_at

    def note_evaluation(self, result: RoundResult | None, now: float) -> None:
        """A round of held-out prompts has ended with `result` (None: it still runs)."""
        if result:
            result["seconds"] = self.age(now)
            log.info("held-out reward %.3f at version %d", result["reward"], result["version"])
            self.gauges.evaluations.append(result)

    def end_hedges(self, winner: str = "") -> None:
        """Cancel leases of hedged groups that `winner` has pushed, or that no longer need two actors."""
        for name, group_id in self.hedges.take_over(self.store.entries, winner):
            if actor := self.fleet.by_name.get(name):
                self.end_lease(actor, group_id, told=name != winner)

    def end_lease(self, actor: Actor, group_id: int, told: bool) -> None:
        """End an actor's lease of a group. `told`: send the actor a cancel, because it does not know yet."""
        if group_id in actor.running:
            actor.running.pop(group_id, None)
            self.fleet.ready.touch(actor)
            if told:
                self.router.send(actor.peer, messages.Cancel([group_id], hand_back=False))

    def runs_on_elsewhere(self, entry: Entry, actor: Actor) -> bool:
        """The lease of `actor` ends without a group. If a second actor has a lease too, the group runs on there."""
        other = self.hedges.end(entry, actor.name)
        if other and other != entry.actor:
            self.replay.commit(events.TakeOver(entry.id, other))
        return bool(other)

    def lose(self, actor: Actor, died: str = "") -> None:
        """An actor is gone: its leases go to other actors; the groups keep their slots. `died`: how, if by itself. One
        of its groups may be the cause, so a group present at `MOST_DEATHS` deaths is dropped."""
        for group_id in actor.running:
            entry = self.store.entries[group_id]
            entry.deaths += bool(died)
            if self.runs_on_elsewhere(entry, actor):
                continue
            if entry.deaths < MOST_DEATHS:
                self.replay.requeue(group_id)
            else:
                log.warning("group %d is dropped: %d actors died on it, the last %s", group_id, entry.deaths, died)
                self.replay.drop(group_id, "actor died", f"{actor.name} {died}, and others before it")
        self.samples.gone(actor.name)
        self.evaluation.lost(actor.name)
        self.fleet.leave(actor)
        self.relays.leave(actor.name)
