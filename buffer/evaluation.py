"""Evaluation on held-out prompts while training continues: a round of leases beside the training leases.

An actor gets its share of a round for version v once it holds v. Weights may change while a round is decoded; the
result says which versions sampled it. Only one round runs at a time. A round that falls due meanwhile is skipped,
except the final one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

from areal_like.types import Lease


class Result(TypedDict):
    """Result of a round: mean reward, mean length (tokens), versions of the oldest and the newest token.
    `note_evaluation` adds `seconds` since the first lease."""

    version: int
    reward: float
    length: float
    oldest_version: int
    newest_version: int
    seconds: NotRequired[float]


@dataclass(slots=True)
class _Round:
    version: int
    unassigned: list[int]
    assigned: dict[int, str] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    oldest: float = math.inf
    newest: int = 0
    moved: dict[int, float] = field(default_factory=dict)  # row → when it was last seen to move
    timeouts: Counter[int] = field(default_factory=Counter)


class Evaluation:
    """A round `every` train steps (0: only before and after training), on the first `prompts` held-out rows."""

    def __init__(self, every: int, prompts: int, temperature: float):
        self.every, self.prompts, self.temperature = every, prompts, temperature
        self.round: _Round | None = None
        self.results: list[Result] = []
        self._round_number = 0
        self._last_steps = -1
        self._final: int | None = None

    def start_if_due(self, version: int, steps: int) -> None:
        """Start a round if one is due after `steps` train steps, whose weights are `version`."""
        if not self.prompts or self.round or steps == self._last_steps:
            return
        if steps == 0 or (self.every > 0 and steps % self.every == 0):
            self._last_steps = steps
            self.start(version)

    def start(self, version: int) -> None:
        self._round_number += 1
        self.round = _Round(version, list(range(self.prompts)))

    def finish_with(self, version: int) -> None:
        """Ask for a last round at the final version, after the one that may be running."""
        if self.prompts:
            self._final = version

    @property
    def finished(self) -> bool:
        return self.round is None and self._final is None

    @property
    def has_rows(self) -> bool:
        """Are there rows to hand out?"""
        return self.round is not None and bool(self.round.unassigned)

    def tick(self) -> None:
        """Start the final round once no other round runs."""
        if self._final is not None and self.round is None:
            if not self.results or self.results[-1]["version"] != self._final:
                self.start(self._final)
            self._final = None

    def leases(self, actor: str, version: int, actors_to_come: int, now: float = 0.0) -> list[Lease]:
        """The actor's share of the round. `actors_to_come`: actors without a share, this one included. Deadlines of the
        rows count from `now`, even if another actor had them before."""
        if not self.round or version < self.round.version or actor in self.round.assigned.values():
            return []
        share = math.ceil(len(self.round.unassigned) / max(1, actors_to_come))
        rows = [self.round.unassigned.pop() for _ in range(min(share, len(self.round.unassigned)))]
        self.round.assigned.update(dict.fromkeys(rows, actor))
        self.round.moved.update(dict.fromkeys(rows, now))
        return [Lease(self._round_number * self.prompts + row, row, "heldout", 1, 1, self.temperature) for row in rows]

    def without_share(self, actors: list[str]) -> int:
        """How many of `actors` have no rows of the running round."""
        busy = set(self.round.assigned.values()) if self.round else set()
        return sum(actor not in busy for actor in actors)

    def lost(self, actor: str) -> None:
        """An actor is gone: hand out its rows again."""
        if self.round:
            rows = [row for row, owner in self.round.assigned.items() if owner == actor]
            for row in rows:
                del self.round.assigned[row]
            self.round.unassigned += rows

    def note_moved(self, actor: str, lease_ids: Iterable[int], now: float) -> None:
        """An actor made progress with these leases."""
        for lease_id in lease_ids if self.round else ():
            row = self.row_of(actor, lease_id)
            if self.round and row is not None:
                self.round.moved[row] = now

    def restart_clocks(self, now: float, actor: str = "") -> None:
        """Count the deadlines of an actor's rows ("": of all rows) from now."""
        if self.round:
            rows = [row for row, owner in self.round.assigned.items() if actor in ("", owner)]
            self.round.moved.update(dict.fromkeys(rows, now))

    def overdue(self, now: float, timeout: float) -> list[tuple[int, str]]:
        """(row, actor) of rows without progress for `timeout` seconds."""
        if not self.round:
            return []
        moved = self.round.moved = {row: self.round.moved.get(row, now) for row in self.round.assigned}
        return [(row, self.round.assigned[row]) for row, at in moved.items() if now - at > timeout]

    def take_back(self, row: int, most: int) -> Result | None:
        """Take a row from its actor; another will get it. The `most`-th time it counts as reward 0. Returns the round's
        result if this row was the last."""
        assert self.round is not None
        self.round.timeouts[row] += 1
        if self.round.timeouts[row] >= most:
            version = self.round.version
            lease_id = self._round_number * self.prompts + row
            return self.record(self.round.assigned[row], lease_id, 0.0, 0, version, version)
        del self.round.assigned[row]
        self.round.unassigned.append(row)
        return None

    def row_of(self, actor: str, lease_id: int) -> int | None:
        """The row of this lease; None if the actor does not have the lease."""
        number, row = divmod(lease_id, max(1, self.prompts))
        mine = self.round and number == self._round_number and self.round.assigned.get(row) == actor
        return row if mine else None

    def record(self, actor: str, lease_id: int, reward: float, length: int, oldest: int, newest: int) -> Result | None:
        """Record the reward of one held-out completion. Ignored if the actor does not have the lease. Returns the
        round's result if this row was the last."""
        row = self.row_of(actor, lease_id)
        if self.round is None or row is None:
            return None
        del self.round.assigned[row]
        self.round.rewards.append(reward)
        self.round.lengths.append(length)
        self.round.oldest, self.round.newest = min(self.round.oldest, oldest), max(self.round.newest, newest)
        if self.round.assigned or self.round.unassigned:
            return None
        n = len(self.round.rewards)
        result: Result = {
            "version": self.round.version,
            "reward": sum(self.round.rewards) / n,
            "length": sum(self.round.lengths) / n,
            "oldest_version": int(self.round.oldest),
            "newest_version": self.round.newest,
        }
        self.results.append(result)
        self.round = None
        return result
