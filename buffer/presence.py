"""Actors that join, fall silent, die, leave or push unfit groups; the start of the run once enough are ready."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from areal_like.wire import messages
from areal_like.wire.frames import WireError
from areal_like.wire.link import BusError
from buffer.checks import AnswerLimits, RolloutsFail, check_hand_back
from buffer.entries import LEASED, RECALLED
from buffer.evaluation import Evaluation
from buffer.gauges import Gauges
from buffer.groups import GroupManager
from buffer.outbox import Outbox
from buffer.peers import MOST_FAILED, MOST_REFUSED, Actor, Peers
from buffer.sizing import GroupLengths

log = logging.getLogger(__name__)
ROLES = ("buffer", "learner")
"""Names that no actor has."""
MOST_DEATHS = 3
"""A group is dropped if this many actors died by themselves while they held it."""


@dataclass
class Presence:
    """Enough actors must be ready within `ready_timeout` seconds; one that is silent for `heartbeat_timeout` seconds
    has left. The groups of an actor that has left keep their slots, and other actors get leases of them."""

    peers: Peers
    groups: GroupManager
    evaluation: Evaluation
    outbox: Outbox
    gauges: Gauges
    heartbeat_timeout: float
    ready_timeout: float

    def __post_init__(self) -> None:
        self._born = self._last_turn = self.peers.clock()

    def hello(self, peer: bytes, message: messages.Hello, owner: str = "") -> None:
        """A process joins. `owner`: the key of an actor, which alone may take its name again. Raises WireError."""
        name, peers, fleet = message.name, self.peers, self.peers.fleet
        actor = fleet.by_peer.get(peer)
        if not name.isprintable():
            raise WireError("a name must consist of printable characters")
        if message.role == "actor" and (not message.slots or name in ROLES):
            raise WireError(f"an actor needs slots, and another name than {', '.join(ROLES)}")
        if actor and actor.name != name:
            raise WireError(f"this connection already belongs to {actor.name}")
        if message.role == "learner":
            if peers.learner.peer not in (None, peer):
                raise WireError("there is a learner already")
            peers.learner.peer = peer
            peers.router.send(peer, messages.Welcome())
            return
        if previous := fleet.by_name.get(name):
            self._check_owner(previous, owner)
            self.remove(previous)
        actor = fleet.join(name, peer, message.slots, peers.clock(), message.pid, owner)
        log.info("%s joined (pid %d)", name, actor.pid)
        peers.router.send(peer, messages.Welcome())
        peers.announce_to(actor)

    def start(self, now: float, waits: Callable[[], list[str]]) -> bool:
        """Start the run if all expected processes are ready. Raises BusError if they are late."""
        peers = self.peers
        # An engine has its own time limit: a large model starts more slowly than the processes connect.
        starting = any(actor.engine == "starting" for actor in peers.fleet)
        if now - self._born > self.ready_timeout and not starting:
            raise BusError(f"after {self.ready_timeout:.0f} s (launcher.ready_timeout) {'; '.join(waits())}")
        ready = sum(actor.version >= 0 for actor in peers.fleet)
        if peers.learner.peer is None or ready < peers.expected_actors:
            return False
        peers.phase.started_at = peers.phase.progress_at = now
        log.info("all %d actors hold version 0: first lease", ready)
        return True

    def remove_silent(self, now: float) -> None:
        fleet = self.peers.fleet
        if now - self._last_turn > self.heartbeat_timeout / 2:  # this process was stopped: silence proves nothing
            for actor in fleet:
                actor.seen = now
            for entry in self.groups.store.entries.of(*LEASED):
                entry.moved_at = entry.grew_at = now
            self.evaluation.restart_clocks(now)
        self._last_turn = now
        for actor in list(fleet):
            if now - actor.seen > self.heartbeat_timeout:
                log.warning("%s: no sign of life for %.0f s: its leases go to others", actor.name, now - actor.seen)
                self.remove(actor)

    def lost(self, message: messages.Lost, owner: str = "") -> None:
        """A supervisor saw a process die: no need to wait for its silence. A pid of 0: any process of that name. Raises
        WireError if the sender has an actor's key, `owner`, and the process another."""
        peers = self.peers
        dead = peers.fleet.by_name.get(message.name)
        if dead and owner:
            self._check_owner(dead, owner)
        if dead and message.pid in (0, dead.pid):
            held = len(self.groups.store.entries.held_by(dead.name))
            log.warning("%s %s: its %d leases go to others", dead.name, message.how, held)
            self.remove(dead, message.how if message.by_itself else "")
        counted = message.name in peers.left_out or message.name in ROLES
        if message.for_good and not counted and peers.expected_actors > 1:
            peers.expected_actors -= 1
            peers.left_out[message.name] = message.how
            log.warning("%s is left out: the run continues without it", message.name)

    def _check_owner(self, actor: Actor, owner: str) -> None:
        if actor.owner != owner:
            raise WireError(f"{actor.name} is an actor of another key")

    def remove(self, actor: Actor, died: str = "") -> None:
        """`died`: how, if by itself. Its groups may be the cause: one present at `MOST_DEATHS` deaths is dropped."""
        for entry in list(self.groups.store.entries.held_by(actor.name).values()):
            entry.deaths += bool(died)
            if entry.deaths < MOST_DEATHS:
                self.groups.requeue(entry.id)
            else:
                log.warning("group %d is dropped: %d actors died on it, the last %s", entry.id, entry.deaths, died)
                self.groups.drop(entry.id, "actor died", f"{actor.name} {died}, and others before it")
        self.evaluation.lost(actor.name)
        self.peers.fleet.leave(actor)

    def hand_back(self, actor: Actor, message: messages.HandBack, limits: AnswerLimits) -> None:
        """The leases of an actor that leaves, or of recalled groups, end, even if the lengths are refused."""
        held, fault = self.groups.store.entries.held_by(actor.name), None
        ended = [held[group_id] for group_id in sorted(held.keys() & message.lengths.keys())]
        for entry in ended:
            lengths = message.lengths[entry.id]
            actor.failed += not message.leaving and entry.stage is not RECALLED
            try:
                check_hand_back(lengths, entry, limits)
                if lengths and entry.stage is RECALLED and self.gauges.measures_lengths:
                    tokens, cut = zip(*lengths, strict=True)
                    self.gauges.seen.append(GroupLengths(tokens, cut).of(entry.launch))
            except WireError as error:
                fault = error
            self.groups.requeue(entry.id)
        if message.leaving:
            log.info("%s leaves; its %d groups go to others", actor.name, len(ended))
            self.remove(actor)
        if fault:
            raise fault

    def passes_on(self, actor: Actor, message: messages.Failed) -> bool:
        """A group failed on this actor. Does another actor get it? Once, if it was not the answers that were
        rejected or have no reward: the actor may be the cause, and would take the prompts from the others."""
        entry, others = self.groups.store.entries[message.id], self.peers.fleet.at_work(self.peers.clock())
        actor.failed += 1
        if actor.failed == MOST_FAILED:
            last = f"{message.reason} {message.detail}"
            log.warning("%s: %d groups in a row failed on it, the last: %s", actor.name, MOST_FAILED, last)
        if message.reason in ("rejected", "no reward") or entry.failed or not any(each is not actor for each in others):
            return False
        entry.failed, entry.failed_on = True, actor.name
        self.groups.requeue(entry.id)
        return True

    def refuse(self, actor: Actor, faults: Mapping[int, WireError]) -> None:
        """End the leases of pushed groups that do not fit the run: other actors roll them out again. A group is dropped
        after MOST_REFUSED refusals. Raises RolloutsFail if every actor had that many groups in a row refused."""
        entries = self.groups.store.entries
        for group_id in sorted(faults.keys() & entries.held_by(actor.name).keys()):
            entry = entries[group_id]
            # The same group again is no new evidence against the actor.
            actor.refused += not entry.refused or entry.failed_on != actor.name
            entry.refused, entry.failed_on = entry.refused + 1, actor.name
            self.gauges.refused += 1
            if entry.refused < MOST_REFUSED:
                self.groups.requeue(group_id)
            else:
                self.groups.drop(group_id, "malformed", str(faults[group_id]))
        self.outbox.put(actor.peer, messages.Pushed(sorted(faults)))  # otherwise they would come again
        if actor.refused >= MOST_REFUSED:
            log.warning("%s gets no more leases: %d groups of it in a row were refused", actor.name, actor.refused)
        if all(each.refused >= MOST_REFUSED for each in self.peers.fleet):
            last = list(faults.values())[-1]
            raise RolloutsFail(f"{MOST_REFUSED} groups in a row of every actor were refused; the last: {last}")
