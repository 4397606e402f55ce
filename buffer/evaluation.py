"""Evaluation on held-out prompts while training continues: a round of leases beside the training leases.

A round asks all sets that are due (`tasks.heldout`). Each answer to a prompt has its own lease. One actor gets all
answers of a prompt, so that a group reward sees them together. An actor gets its share of a round for version v once it
holds v. Weights may change while a round is decoded; the result has the versions it is from. Only one round runs at
a time. A round that falls due meanwhile is skipped, except the final one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, NotRequired, TypedDict

from areal_like.estimates import figures
from areal_like.tasks.heldout import HeldoutSet
from areal_like.types import Lease


class Asked(NamedTuple):
    """What the buffer knows of a set (see `areal_like.tasks.heldout.HeldoutSet`); `prompts` counts them."""

    name: str
    prompts: int
    samples: int = 1
    temperature: float = 0.0
    every: int = 0
    ks: tuple[int, ...] = (1,)
    right: float = 1.0
    own: bool = True

    @property
    def answers(self) -> int:
        return self.prompts * self.samples


def asked(sets: Iterable[HeldoutSet]) -> list[Asked]:
    return [Asked(e.name, len(e.rows), e.samples, e.temperature, e.every, e.ks, e.right, e.own) for e in sets]


class RoundResult(TypedDict):
    """Result of a round: mean reward, mean length (tokens), versions of the oldest and the newest token.
    `note_evaluation` adds `seconds` since the first lease. `sets`: per set its figures (`reward`, `pass@4`), mean
    length, and numbers of prompts and samples. A figure comes with the ends of its interval (`reward_low`,
    `reward_high`) if it has one. Reward and length of the round are those of the run's own sets, else of all sets."""

    version: int
    reward: float
    length: float
    oldest_version: int
    newest_version: int
    sets: dict[str, dict[str, float]]
    seconds: NotRequired[float]


class AnswerResult(NamedTuple):
    reward: float
    length: int


class AnswerPlace(NamedTuple):
    """Where an answer belongs: its set, the prompt's place in the set, and which sample of the prompt it is."""

    of: Asked
    prompt: int
    sample: int


@dataclass(slots=True)
class _Round:
    version: int
    unassigned: list[int]  # places
    assigned: dict[int, str] = field(default_factory=dict)
    answers: dict[int, AnswerResult] = field(default_factory=dict)
    oldest: float = math.inf
    newest: int = 0
    moved: dict[int, float] = field(default_factory=dict)  # place → time of its last progress
    timeouts: Counter[int] = field(default_factory=Counter)


class Evaluation:
    """Rounds of `sets`, each `every` so many train steps (0: only before and after training). A place is a number for
    each answer of all sets."""

    def __init__(self, sets: Sequence[Asked]):
        self.sets = list(sets)
        self._firsts = [0, *accumulate(each.answers for each in self.sets)]
        self.places = self._firsts.pop()
        self.round: _Round | None = None
        self.results: list[RoundResult] = []
        self._round_number = 0
        self._last_steps = -1
        self._final: int | None = None

    def start_if_due(self, version: int, steps: int) -> None:
        """Start a round of the sets that are due after `steps` train steps. The weights are `version`."""
        if not self.places or self.round or steps == self._last_steps:
            return
        if due := [each for each in self.sets if steps == 0 or (each.every > 0 and steps % each.every == 0)]:
            self._last_steps = steps
            self.start(version, due)

    def start(self, version: int, due: Sequence[Asked] | None = None) -> None:
        """Start a round; `due`: of these sets (None: all)."""
        self._round_number += 1
        pairs = zip(self.sets, self._firsts, strict=True)
        places = [first + n for each, first in pairs if due is None or each in due for n in range(each.answers)]
        self.round = _Round(version, places)

    def finish_with(self, version: int) -> None:
        """Request a last round at the final version. A running round ends first."""
        if self.places:
            self._final = version

    @property
    def finished(self) -> bool:
        return self.round is None and self._final is None

    @property
    def has_rows(self) -> bool:
        """Are there rows to hand out?"""
        return self.round is not None and bool(self.round.unassigned)

    def tick(self) -> None:
        """Start the final round once no other round runs, unless every set was already evaluated at that version."""
        if self._final is not None and self.round is None:
            told = {name for result in self.results if result["version"] == self._final for name in result["sets"]}
            if told != {each.name for each in self.sets}:
                self.start(self._final)
            self._final = None

    def place(self, number: int) -> AnswerPlace:
        """What a place stands for."""
        at = max(n for n, first in enumerate(self._firsts) if first <= number)
        of = self.sets[at]
        return AnswerPlace(of, *divmod(number - self._firsts[at], of.samples))

    def leases(self, actor: str, version: int, actors_to_come: int, now: float = 0.0) -> list[Lease]:
        """The actor's share of the round, in whole prompts. `actors_to_come`: actors without a share, including this
        one. Deadlines of the rows count from `now`, even if another actor had the rows before."""
        if not self.round or version < self.round.version or actor in self.round.assigned.values():
            return []
        share = math.ceil(len(self.round.unassigned) / max(1, actors_to_come))
        prompts: dict[int, list[int]] = {}
        for number in self.round.unassigned:
            prompts.setdefault(number - self.place(number).sample, []).append(number)
        numbers: list[int] = []
        while prompts and len(numbers) < share:
            numbers += prompts.popitem()[1]
        self.round.unassigned = [number for each in prompts.values() for number in each]
        self.round.assigned.update(dict.fromkeys(numbers, actor))
        self.round.moved.update(dict.fromkeys(numbers, now))
        return [self._lease(number) for number in numbers]

    def _lease(self, number: int) -> Lease:
        of, prompt, sample = self.place(number)
        lease_id = self._round_number * self.places + number
        return Lease(lease_id, prompt, of.name, 1, 1, of.temperature, sample)

    def without_share(self, actors: list[str]) -> int:
        """How many of `actors` have no row of the running round."""
        busy = set(self.round.assigned.values()) if self.round else set()
        return sum(actor not in busy for actor in actors)

    def lost(self, actor: str) -> None:
        """An actor is lost: its rows go to other actors."""
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

    def take_back(self, row: int, most: int) -> RoundResult | None:
        """Take a row from its actor; another will get it. The `most`-th time it counts as reward 0. Returns the round's
        result if this row was the last."""
        assert self.round is not None
        self.round.timeouts[row] += 1
        if self.round.timeouts[row] >= most:
            version = self.round.version
            lease_id = self._round_number * self.places + row
            return self.record(self.round.assigned[row], lease_id, 0.0, 0, version, version)
        del self.round.assigned[row]
        self.round.unassigned.append(row)
        return None

    def row_of(self, actor: str, lease_id: int) -> int | None:
        """The place of this lease; None if the actor does not have the lease."""
        number, row = divmod(lease_id, max(1, self.places))
        mine = self.round and number == self._round_number and self.round.assigned.get(row) == actor
        return row if mine else None

    def record(
        self, actor: str, lease_id: int, reward: float, length: int, oldest: int, newest: int
    ) -> RoundResult | None:
        """Record the reward of one held-out completion. Ignored if the actor does not have the lease. Returns the
        round's result if this row was the last."""
        row = self.row_of(actor, lease_id)
        if self.round is None or row is None:
            return None
        del self.round.assigned[row]
        self.round.answers[row] = AnswerResult(reward, length)
        self.round.oldest, self.round.newest = min(self.round.oldest, oldest), max(self.round.newest, newest)
        if self.round.assigned or self.round.unassigned:
            return None
        result = self._result(self.round)
        self.results.append(result)
        self.round = None
        return result

    def _result(self, ended: _Round) -> RoundResult:
        pairs = zip(self.sets, self._firsts, strict=True)
        found = {
            s: [ended.answers[first + n] for n in range(s.answers)] for s, first in pairs if first in ended.answers
        }
        own = [answer for s, answers in found.items() if s.own for answer in answers]
        counted = own or list(ended.answers.values())
        return {
            "version": ended.version,
            "reward": sum(answer.reward for answer in counted) / len(counted),
            "length": sum(answer.length for answer in counted) / len(counted),
            "oldest_version": int(ended.oldest),
            "newest_version": ended.newest,
            "sets": {s.name: figures_of(s, answers) for s, answers in found.items()},
        }


def figures_of(of: Asked, answers: Sequence[AnswerResult]) -> dict[str, float]:
    """The figures of a set, as in `RoundResult.sets`. All `answers` to one prompt are adjacent."""
    rewards = [[answer.reward for answer in answers[at : at + of.samples]] for at in range(0, len(answers), of.samples)]
    found: dict[str, float] = {"prompts": of.prompts, "samples": of.samples}
    found["length"] = sum(answer.length for answer in answers) / len(answers)
    for name, (mean, low, high) in figures(rewards, of.ks, of.right).items():
        found[name] = mean
        if math.isfinite(high - low):
            found |= {f"{name}_low": low, f"{name}_high": high}
    return found
