"""The buffer's view of an actor: its weights, its leases, and when it was last heard from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Stats = Mapping[str, float | str]
"""What an actor reports about itself: see `actors.measures`."""


@dataclass(slots=True)
class Actor:
    """`peer`: routing id. `pid`: process id on its own host. `slots`: sequences that its engine decodes at once.
    `version`: the weights it last applied (−1: none yet). `running`: its groups by id, and when each was leased or last
    made progress. `leased`, `ended`: sequences since it joined. `refused`: its refused groups in a row.

    `timed_out`: leases without progress that it lost since it last finished a group.
    `benched_until`: it gets no leases before then (`buffer.deadlines`)."""

    name: str
    peer: bytes
    slots: int
    seen: float
    pid: int = 0
    version: int = -1
    leased: int = 0
    ended: int = 0
    running: dict[int, float] = field(default_factory=dict)
    stats: Stats = field(default_factory=dict)
    refused: int = 0
    timed_out: int = 0
    benched_until: float = -math.inf
    number: int = 0  # actors are numbered as they join
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

    def report(self, now: float) -> dict[str, object]:
        """What people see of it, as plain data (`scripts.status`)."""
        shown = {name: getattr(self, name) for name in ("version", "timed_out", "stats", "engine", "engine_note")}
        return shown | {"running": len(self.running), "silent_seconds": now - self.seen}

    def takes(self, sequences: int) -> bool:
        """May it get a group of `sequences` sequences? An idle actor always may, even if its engine has fewer slots."""
        return self.free_slots >= sequences or not self.running

    def lease(self, group_id: int, sequences: int, now: float) -> None:
        """Count a new lease."""
        self.running[group_id] = now
        self.leased += sequences

    def note_moved(self, group_ids: Iterable[int], now: float) -> None:
        """These groups made progress; ignores groups that it does not run."""
        self.running.update((each, now) for each in group_ids if each in self.running)

    def has_finished(self) -> None:
        """The actor finished a group: forget its lost leases and end its bench."""
        self.timed_out, self.benched_until = 0, -math.inf
