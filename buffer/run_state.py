"""What the buffer knows of one run: the parts that hold it, and the few facts that belong to none of them.

The controller's loop passes it around: `handlers` changes it when a message comes, `leasing` and the controller decide
by it, `status` tells of it. One thread, no locks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from areal_like.bus import Router
from areal_like.wire import Message
from buffer.checks import Failures
from buffer.evaluation import Evaluation
from buffer.fleet import Actor, Fleet, Hedges
from buffer.gauges import Gauges
from buffer.injection import lets_go_to
from buffer.outbox import Outbox
from buffer.prompts import PromptCursor
from buffer.relays import Relays
from buffer.replay import Replay
from buffer.schedulers import Scheduler
from buffer.shares import Shares
from buffer.sizing import check_sizes
from buffer.store import Stage, Store
from buffer.verifiers import Verifiers

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RunState:
    """`expected_actors` must hold version 0 before the first lease; over `max_bytes` of payloads nothing is started but
    what the learner's next batch lacks; `largest_payload` is that of one group so far. The data ends with `last_batch`
    (None: the end is not known). `version` is the newest that the actors were told of (-1: none), `manifest` its
    description; `published` is the learner's newest; `digests` has the digests of all recent ones; `vocab_size` tokens
    are known to the learner's model (None: it has not said). `steps` batches have been trained; `wanted` is the
    learner's open request; `parts`: it wants groups as they finish, and so many of that batch have been sent (None: it
    does not); `shares` the batches sent, until they are trained: they may be asked for
    again. `stopping`: the run is to end, "now" or ("drain") once what was admitted is trained. `redo` batches were set
    aside, as files in the run's `folder` (None: nowhere). Times are those of the monotonic clock, in seconds."""

    router: Router
    outbox: Outbox
    replay: Replay
    scheduler: Scheduler
    prompts: PromptCursor
    evaluation: Evaluation
    expected_actors: int
    max_bytes: int
    last_batch: int | None = None
    steps: int = 0
    largest_payload: int = 0
    version: int = -1
    manifest: dict[str, Any] | None = None
    published: dict[str, Any] | None = None
    digests: dict[int, str] = field(default_factory=dict)
    vocab_size: int | None = None
    learner: bytes | None = None
    wanted: Message | None = None
    parts: int | None = None
    started_at: float | None = None
    progress_at: float = 0.0
    stopping: Literal["", "now", "drain"] = ""
    finishing: bool = False
    reported: bool = False
    hedges: Hedges = field(default_factory=Hedges)
    lease_timeouts: int = 0  # leases revoked for want of progress
    left_out: dict[str, str] = field(default_factory=dict)  # actors that are not started again, and how they died
    fleet: Fleet = field(default_factory=Fleet)
    relays: Relays = field(default_factory=Relays)
    gauges: Gauges = field(default_factory=Gauges)
    shares: Shares = field(default_factory=Shares)
    verifiers: Verifiers = field(default_factory=Verifiers)
    redo: int = 0
    folder: Path | None = None
    failures: Failures = field(init=False)
    store: Store = field(init=False)
    samples_per_batch: int = field(init=False)

    def __post_init__(self) -> None:
        self.samples_per_batch = check_sizes(self.scheduler.sizing, self.replay.bound.groups_per_batch)
        self.store = self.replay.store
        self.gauges.since_step = self.steps
        self.failures = Failures(most=4 * self.replay.bound.groups_per_batch)

    def announce(self) -> None:
        """Tell the actors of the newest weights, unless they must go on with those that they have (`injection`)."""
        if self.published is self.manifest or self.published is None:
            return
        if self.finishing or lets_go_to(self.replay, self.published["version"]):
            self.manifest, self.version = self.published, self.published["version"]
            for actor in self.fleet:
                self.tell(actor.peer, actor.name)

    def tell(self, peer: bytes, name: str) -> None:
        """Announce the newest weights to one actor, if there are any, and whom to ask for them."""
        if self.manifest:
            self.router.send(peer, "announce", {"manifest": {**self.manifest, "relays": self.relays.above(name)}})

    def may_push(self, actor: Actor, group_id: int) -> bool:
        """Has this actor, or had it, a lease of the group? A lease that went to another does not void the work of who
        had it before: the first push wins. Of groups that are here already, or gone, pushes change nothing."""
        entry = self.store.entries.get(group_id)
        return entry is None or entry.stage in (Stage.WAITING, Stage.SERVED) or actor.name in entry.holders

    def age(self, now: float) -> float:
        """Seconds since the first lease."""
        return 0.0 if self.started_at is None else now - self.started_at

    def note_evaluation(self, result: dict[str, Any] | None, now: float) -> None:
        """A round of held-out prompts has ended with `result` (None: it goes on)."""
        if result:
            result["seconds"] = self.age(now)
            log.info("held-out reward %.3f at version %d", result["reward"], result["version"])
            self.gauges.evaluations.append(result)

    def end_hedges(self, winner: str = "") -> None:
        """Cancel the leases of hedged groups that have come (from `winner`), or need not come from two."""
        for name, group_id in self.hedges.take_over(self.store.entries, winner):
            if actor := self.fleet.by_name.get(name):
                self.end_lease(actor, group_id, told=name != winner)

    def end_lease(self, actor: Actor, group_id: int, told: bool) -> None:
        """Nothing is to come of it any more; `told`: the actor does not know that yet."""
        if group_id in actor.running:
            actor.running.discard(group_id)
            if told:
                self.router.send(actor.peer, "cancel", {"ids": [group_id], "give_back": False})

    def lose(self, actor: Actor) -> None:
        """An actor is gone: its leases go to others; the groups keep their slots. Who is parked is needed then."""
        if not actor.parked:
            self.fleet.unpark()
        for group_id in actor.running:
            if not self.hedges.leave_to_other(self.store.entries[group_id], actor.name):
                self.replay.requeue(group_id)
        self.evaluation.lost(actor.name)
        self.fleet.leave(actor)
        self.relays.leave(actor.name)
