"""The actors that the buffer knows: the weights and leases of each, and when it was last heard from. Also hedges:
groups that two actors work on.

No I/O; time is passed in. A restarted actor process says hello under its old name and replaces the old process.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean

from buffer.actor import Actor, Stats
from buffer.ready import Ready
from buffer.store import LEASED, Entry, Stage

MOST_REFUSED = 3
"""A group is dropped after this many refused pushes. An actor gets no more leases after this many refused groups in a
row, until it joins again."""
OVER_PRESENT: dict[str, Callable[[list[float]], float]] = {"now": sum, "mean": fmean, "max": max}
"""How to combine the numbers of the present actors."""


class Fleet:
    """Actors by name and by routing id. Two collections save a scan over all actors in each turn of the loop:

    `ready`: actors that may have room. `odd`: all actors that may not get leases (`at_work`), and some that may.

    `room`: the fewest sequences of any lease so far (inf: there was none); actors do not report fewer free slots.
    `step`: the greatest divisor of the sizes of all leases (0: there was none).
    """

    def __init__(self) -> None:
        self.ready = Ready()
        self.odd: set[str] = set()
        self.room, self.step = math.inf, 0
        self._joined = 0
        self._silent_from = -math.inf  # nobody can have been silent for too long before this time
        self.by_name: dict[str, Actor] = {}
        self.by_peer: dict[bytes, Actor] = {}
        self._counted: dict[str, tuple[bytes, Stats]] = {}  # by name: last report of its newest process
        self._before: Counter[str] = Counter()  # counts of processes that a newer one of the same name replaced

    def __iter__(self) -> Iterator[Actor]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    def join(self, name: str, peer: bytes, slots: int, now: float, pid: int = 0) -> Actor:
        """Add an actor. The caller has removed any earlier actor of that name."""
        actor = Actor(name, peer, slots, now, pid, number=self._joined)
        self._joined += 1
        self.by_name[name] = self.by_peer[peer] = actor
        self.ready.touch(actor)
        return actor

    def leave(self, actor: Actor) -> None:
        self.by_name.pop(actor.name, None)
        self.ready.discard(actor.name)
        self.odd.discard(actor.name)
        self.by_peer.pop(actor.peer, None)

    def barred(self, now: float) -> set[str]:
        """Names of actors that get no leases. An actor with too many refused groups in a row never does. A benched
        actor, or one whose engine does not serve, does only if there is no other."""
        if not self.odd:
            return set()
        odd = {name: self.by_name[name] for name in self.odd}
        self.odd = {name for name, actor in odd.items() if _is_odd(actor, now)}
        if len(self.odd) < len(self):  # at least one actor is in order
            return {name for name in self.odd if not _may_work(odd[name], now)}
        actors = [actor for actor in self if actor.refused < MOST_REFUSED]
        at_work = _not_benched([actor for actor in actors if actor.engine == "serving"] or actors, now)
        return self.by_name.keys() - {actor.name for actor in at_work}

    def at_work(self, now: float) -> list[Actor]:
        """Actors that may get leases."""
        barred = self.barred(now)
        return [actor for actor in self if actor.name not in barred]

    def for_heldout(self, now: float) -> list[Actor]:
        """Actors that may get held-out prompts."""
        return _not_benched(list(self), now)

    def silent(self, now: float, timeout: float) -> list[Actor]:
        if now < self._silent_from:
            return []
        self._silent_from = timeout + min((actor.seen for actor in self), default=now)
        return [actor for actor in self if now - actor.seen > timeout]

    def restart_clocks(self, now: float) -> None:
        """Restart all clocks: no actor counts as silent, and no lease as hung, for a full time-out from now."""
        for actor in self:
            actor.seen = now
            actor.note_moved(actor.running, now)

    @staticmethod
    def fair_share(groups: float, sharers: int) -> float:
        """How many groups one of `sharers` actors may hold if all hold `groups` together, with those that could start.

        Without this limit the first actor with new weights would take a whole round, and the others would idle.
        """
        return groups if math.isinf(groups) else math.ceil(groups / max(1, sharers))

    def note_stats(self, actor: Actor, stats: Stats) -> None:
        """Store an actor's report. A process counts from 0; counts of an earlier process of that name stay included."""
        peer, said = self._counted.get(actor.name, (actor.peer, {}))
        if peer != actor.peer:
            self._before.update(_numbers(said))
        self._counted[actor.name] = actor.peer, stats
        actor.stats = stats
        if actor.engine != "serving":
            self.odd.add(actor.name)

    def metrics(self) -> dict[str, float]:
        """The actors' reports, combined as the keys ask for (`actors.measures`). A sum never falls: it includes actors
        that left and earlier processes."""
        sums, here = self._before.copy(), defaultdict[str, list[float]](list)
        for _, stats in self._counted.values():
            sums.update(_numbers(stats))
        for actor in self:
            for key, value in _numbers(actor.stats).items():
                here[key].append(value)
        found: dict[str, float] = {}
        for key, total in sums.items():
            how, _, metric = key.partition(":")
            if how == "sum":
                found[metric] = total
            elif how == "part":
                whole = sums[f"whole:{metric}"]
                found[metric] = total / whole if whole else 0.0
            elif how in OVER_PRESENT and key in here:
                found[metric] = OVER_PRESENT[how](here[key])
        return found


def _numbers(stats: Stats) -> dict[str, float]:
    return {key: value for key, value in stats.items() if isinstance(value, float)}


def _is_odd(actor: Actor, now: float) -> bool:
    return actor.refused > 0 or actor.engine != "serving" or actor.benched_until > now


def _may_work(actor: Actor, now: float) -> bool:
    return actor.refused < MOST_REFUSED and actor.engine == "serving" and actor.benched_until <= now


def _not_benched(actors: list[Actor], now: float) -> list[Actor]:
    return [actor for actor in actors if actor.benched_until <= now] or actors


class Hedges:
    """A group whose lease makes no progress also goes to an idle actor, before its deadline.

        lease ──no progress for half the deadline──► leased to a second actor, if one has room and weights as new
          ├──either pushes──────────► the group is WAITING; the other lease is cancelled, its late push is a duplicate
          ├──either ends otherwise──► the other one continues alone (failed, refused, handed back, lost, timed out)
          └──recalled, or too old───► the second lease is cancelled

    A hedged group stays one entry with one slot, so hedges do not concern the bound and the ledger. The second actor's
    weights are at least as new as the first one's, so the group's deadline holds for both. Random numbers depend on
    group, sample and position, so with the same weights both actors sample the same tokens.

    `pairs`: group → its first and its second actor. `made`: number of hedges so far. `overtaken`: first actors that
    lost a group to the second one, for `buffer.deadlines` to note."""

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[str, str]] = {}
        self.made = 0
        self.overtaken: list[str] = []

    def add(self, entry: Entry, second: str) -> None:
        first = entry.actor
        entry.leased_to(second)  # for `Entry.holders`
        entry.leased_to(first)
        self.pairs[entry.id] = first, second
        self.made += 1

    def holds(self, entry: Entry, actor: str) -> bool:
        """Does this actor have a lease of the group, and does the group still run?"""
        return entry.stage in LEASED and (entry.actor == actor or actor in self.pairs.get(entry.id, ()))

    def end(self, entry: Entry, actor: str) -> str:
        """End the hedge: the lease of `actor` has ended without a group. Returns the actor that continues, or ""."""
        pair = self.pairs.get(entry.id)
        if pair is None or actor not in pair or entry.stage not in LEASED:
            return ""
        del self.pairs[entry.id]
        return pair[1] if actor == pair[0] else pair[0]

    def take_over(self, entries: Mapping[int, Entry], winner: str = "") -> list[tuple[str, int]]:
        """The leases to cancel, as (actor, group): both if the group has ended (`winner` has pushed it), the second
        one if the group is recalled."""
        if not self.pairs:
            return []
        ended: list[tuple[str, int]] = []
        for group_id, (first, second) in list(self.pairs.items()):
            entry = entries.get(group_id)
            if entry is None or entry.stage not in LEASED:
                ended += [(first, group_id), (second, group_id)]
                self.overtaken += [first] * (winner == second)
            elif entry.stage is Stage.RECALLED:
                ended.append((second, group_id))
            else:
                continue
            del self.pairs[group_id]
        return ended


def may_be_hedged(entry: Entry, hedges: Hedges) -> bool:
    """Redundant groups are never hedged: another group of the round takes their place."""
    return entry.stage is Stage.RUNNING and entry.id not in hedges.pairs


def is_idle_for(actor: Actor, entry: Entry) -> bool:
    """Does this actor have room for the group, new enough weights, and no recent failure?"""
    free = actor.free_slots >= entry.launch
    good = actor.engine == "serving" and not actor.timed_out and actor.name not in (entry.actor, entry.failed_on)
    return free and good and actor.version >= entry.lease_version
