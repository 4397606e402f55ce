"""Hedges: a group whose lease makes no progress is leased to an idle actor as well, before its deadline.

    lease ──no progress for half the deadline──► leased to a second actor, if one has room and weights as new
      ├──either pushes──────────► the group is here; the other lease is cancelled, what it pushes late is a duplicate
      ├──either ends otherwise──► the other one goes on alone (failed, refused, handed back, lost, timed out)
      └──recalled, or too old───► the second lease is cancelled

A group stays one entry with one slot, so the bound and the ledger know nothing of hedges. The second lease is of
weights that are no older than the first one's, so the group's deadline holds for both. Tokens are drawn by group,
sample and position, so of the same weights both actors sample the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from buffer.fleet import Actor
from buffer.store import ASKED_BACK, LEASED, Entry, Stage


class Hedges:
    """`pairs`: group → who has a lease of it, the first one first; `made` counts all so far; `overtaken`: whose groups
    came from the second one, for `buffer.deadlines` to note."""

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
        """Has this actor a lease of a group that runs?"""
        return entry.stage in LEASED and (entry.actor == actor or actor in self.pairs.get(entry.id, ()))

    def leave_to_other(self, entry: Entry, actor: str) -> bool:
        """The lease of `actor` ends without a group: if another has one as well, the group runs on there."""
        pair = self.pairs.get(entry.id)
        if pair is None or actor not in pair or entry.stage not in LEASED:
            return False
        del self.pairs[entry.id]
        entry.leased_to(pair[1] if actor == pair[0] else pair[0])
        return True

    def take_over(self, entries: Mapping[int, Entry], winner: str = "") -> list[tuple[str, int]]:
        """(actor, group) of the leases that are to be cancelled: both where the group runs no more, as `winner` has
        pushed it; the second one where it is recalled."""
        ended: list[tuple[str, int]] = []
        for group_id, (first, second) in list(self.pairs.items()):
            entry = entries.get(group_id)
            if entry is None or entry.stage not in LEASED:
                ended += [(first, group_id), (second, group_id)]
                self.overtaken += [first] * (winner == second)
            elif entry.stage in ASKED_BACK:
                ended.append((second, group_id))
            else:
                continue
            del self.pairs[group_id]
        return ended


def may_be_hedged(entry: Entry, hedges: Hedges) -> bool:
    """Spare groups are not: another of the round takes their place."""
    return entry.stage is Stage.RUNNING and entry.id not in hedges.pairs


def is_idle_for(actor: Actor, entry: Entry) -> bool:
    """Has this actor room for the group, and no reason not to get it?"""
    free = actor.free_slots >= entry.launch
    good = actor.engine == "serving" and not actor.timed_out and actor.name not in (entry.actor, entry.avoid)
    return free and good and actor.version >= entry.lease_version
