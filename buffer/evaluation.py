"""Evaluation on held-out prompts while training continues: a round of leases beside the training leases.

A round asks all sets that are due (`tasks.heldout`). Each answer to a prompt has its own lease. One actor gets all
answers of a prompt, so that a group reward sees them together. An actor gets its share of a round for version v once it
holds v. Weights may change while a round is decoded; the result has the versions it is from. Only one round runs at
a time. A round that falls due meanwhile is skipped, except the final one.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NotRequired, TypedDict

from areal_like.estimates import figures
from areal_like.tasks.heldout import HeldoutSet
from areal_like.types import Lease


class RoundResult(TypedDict):
    """Result of a round: mean reward and length (tokens) of the run's own sets, else of all; versions of the oldest and
    the newest token; `seconds` since the first lease. `sets`: see `figures_of`."""

    version: int
    reward: float
    length: float
    oldest_version: int
    newest_version: int
    sets: dict[str, dict[str, float]]
    seconds: NotRequired[float]


class AnswerResult(NamedTuple):
    """`length` in tokens; versions of the `oldest` and the `newest` token."""

    reward: float
    length: int
    oldest: int
    newest: int


class AnswerPlace(NamedTuple):
    """Where an answer belongs: its set, the prompt's place in the set, and which sample of the prompt it is."""

    of: HeldoutSet
    prompt: int
    sample: int


@dataclass(slots=True)
class _Round:
    """Keys are places, or actors. `moved`: time of a place's last progress. `made`: tokens and answers of an actor;
    `grew`: that number, and when it last rose."""

    version: int
    unassigned: list[int]
    assigned: dict[int, str] = field(default_factory=dict)
    rows_of: Counter[str] = field(default_factory=Counter)  # assigned rows, by actor
    answers: dict[int, AnswerResult] = field(default_factory=dict)
    moved: dict[int, float] = field(default_factory=dict)
    timeouts: Counter[int] = field(default_factory=Counter)
    tokens: dict[int, int] = field(default_factory=dict)
    made: Counter[str] = field(default_factory=Counter)
    grew: dict[str, tuple[int, float]] = field(default_factory=dict)

    def assign(self, places: list[int], actor: str, now: float) -> None:
        self.assigned.update(dict.fromkeys(places, actor))
        self.moved.update(dict.fromkeys(places, now))
        self.tokens.update(dict.fromkeys(places, 0))
        self.rows_of[actor] += len(places)
        self.grew[actor] = self.made[actor], now

    def release(self, place: int) -> None:
        self.rows_of[self.assigned.pop(place)] -= 1

    def take_back(self, place: int) -> None:
        self.release(place)
        self.unassigned.append(place)


class Evaluation:
    """Rounds of `sets`, each `every` so many steps (0: only before and after training). A place numbers an answer."""

    def __init__(self, sets: Sequence[HeldoutSet]):
        self.sets = list(sets)
        self.places = [
            AnswerPlace(of, prompt, sample)
            for of in sets
            for prompt in range(len(of.rows))
            for sample in range(of.samples)
        ]
        self.round: _Round | None = None
        self.results: list[RoundResult] = []
        self._round_number = 0
        self._last_steps = -1
        self._final: int | None = None

    def start_if_due(self, version: int, steps: int) -> None:
        """Start a round of the sets that are due after `steps` train steps. The weights are `version`."""
        if self.round or steps == self._last_steps:
            return
        if due := [each for each in self.sets if steps == 0 or (each.every > 0 and steps % each.every == 0)]:
            self._last_steps = steps
            self._start(version, due)

    def _start(self, version: int, due: Sequence[HeldoutSet]) -> None:
        self._round_number += 1
        self.round = _Round(version, [number for number, place in enumerate(self.places) if place.of in due])

    def finish_with(self, version: int) -> None:
        """Request a last round at the final version. A running round ends first."""
        if self.places:
            self._final = version

    @property
    def finished(self) -> bool:
        return self.round is None and self._final is None

    @property
    def has_rows(self) -> bool:
        return self.round is not None and bool(self.round.unassigned)

    def tick(self) -> None:
        """Start the final round once no other round runs, unless every set was already evaluated at that version."""
        if self._final is not None and self.round is None:
            done = {name for result in self.results if result["version"] == self._final for name in result["sets"]}
            if done != {each.name for each in self.sets}:
                self._start(self._final, self.sets)
            self._final = None

    def leases(self, actor: str, version: int, actors_to_come: int, now: float = 0.0) -> list[Lease]:
        """The actor's share of the round, in whole prompts. `actors_to_come`: actors without a share, including this
        one. Deadlines of the rows count from `now`, even if another actor had the rows before."""
        if not self.round or version < self.round.version or self.round.rows_of[actor]:
            return []
        share = math.ceil(len(self.round.unassigned) / max(1, actors_to_come))
        prompts: dict[int, list[int]] = {}
        for number in self.round.unassigned:
            prompts.setdefault(number - self.places[number].sample, []).append(number)
        numbers: list[int] = []
        while prompts and len(numbers) < share:
            numbers += prompts.popitem()[1]
        self.round.unassigned = [number for each in prompts.values() for number in each]
        self.round.assign(numbers, actor, now)
        first, asked = self._round_number * len(self.places), [(number, *self.places[number]) for number in numbers]
        return [Lease(first + n, prompt, of.name, 1, 1, of.temperature, sample) for n, of, prompt, sample in asked]

    def row_of(self, actor: str, lease_id: int) -> int | None:
        """The place of this lease; None if the actor does not have the lease."""
        number, row = divmod(lease_id, max(1, len(self.places)))
        mine = self.round and number == self._round_number and self.round.assigned.get(row) == actor
        return row if mine else None

    def without_share(self, actors: list[str]) -> int:
        """How many of `actors` have no row of the running round."""
        return sum(not (self.round and self.round.rows_of[actor]) for actor in actors)

    def lost(self, actor: str) -> None:
        if self.round:
            for row in [row for row, owner in self.round.assigned.items() if owner == actor]:
                self.round.take_back(row)

    def note_moved(self, actor: str, tokens: Mapping[int, int], now: float, most: float = math.inf) -> None:
        """An actor reports progress with its places. For more than `most` seconds without a token or an answer more, of
        any of its places, that does not count."""
        if not self.round:
            return
        for row, count in tokens.items():
            self.round.made[actor] += max(0, count - self.round.tokens[row])
            self.round.tokens[row] = max(count, self.round.tokens[row])
        made, (before, since) = self.round.made[actor], self.round.grew.get(actor, (-1, now))
        self.round.grew[actor] = made, now if made > before else since
        if made > before or now - since < most:
            self.round.moved.update(dict.fromkeys(tokens, now))

    def restart_clocks(self, now: float, actor: str = "") -> None:
        """Count the deadlines of an actor's rows ("": of all rows) from now."""
        if self.round:
            self.round.moved |= {row: now for row, owner in self.round.assigned.items() if actor in ("", owner)}
            self.round.grew |= {name: (self.round.made[name], now) for name in self.round.grew if actor in ("", name)}

    def overdue(self, now: float, timeout: float) -> list[tuple[int, str]]:
        """(row, actor) of rows without progress for `timeout` seconds."""
        found = self.round
        return [each for each in found.assigned.items() if now - found.moved[each[0]] > timeout] if found else []

    def take_back(self, row: int, most: int) -> RoundResult | None:
        """Take a row from its actor; the `most`-th time it counts as reward 0. Returns the round's result once over."""
        assert self.round is not None
        self.round.timeouts[row] += 1
        if self.round.timeouts[row] >= most:
            return self._answered(self.round, row, AnswerResult(0.0, 0, self.round.version, self.round.version))
        self.round.take_back(row)
        return None

    def record(self, actor: str, lease_id: int, answer: AnswerResult) -> RoundResult | None:
        """Record one held-out answer. Ignored without a lease. Returns the round's result after the last."""
        row = self.row_of(actor, lease_id)
        return None if self.round is None or row is None else self._answered(self.round, row, answer)

    def _answered(self, under_way: _Round, row: int, answer: AnswerResult) -> RoundResult | None:
        under_way.made[under_way.assigned[row]] += 1
        under_way.release(row)
        under_way.answers[row] = answer
        if under_way.assigned or under_way.unassigned:
            return None
        self.results.append(self._result(under_way))
        self.round = None
        return self.results[-1]

    def _result(self, ended: _Round) -> RoundResult:
        found: dict[str, list[AnswerResult]] = {}
        for number, answer in sorted(ended.answers.items()):
            found.setdefault(self.places[number].of.name, []).append(answer)
        asked = [each for each in self.sets if each.name in found]
        counted = [answer for each in asked if each.own for answer in found[each.name]] or list(ended.answers.values())
        return {
            "version": ended.version,
            "reward": sum(answer.reward for answer in counted) / len(counted),
            "length": sum(answer.length for answer in counted) / len(counted),
            "oldest_version": min(answer.oldest for answer in ended.answers.values()),
            "newest_version": max(answer.newest for answer in ended.answers.values()),
            "sets": {each.name: figures_of(each, found[each.name]) for each in asked},
        }


def figures_of(of: HeldoutSet, answers: Sequence[AnswerResult]) -> dict[str, float]:
    """The figures of a set (`reward`, `pass@4`), with the ends of their intervals (`reward_low`, `reward_high`), mean
    length, and numbers of prompts and samples. All `answers` to one prompt are adjacent."""
    rewards = [[answer.reward for answer in answers[at : at + of.samples]] for at in range(0, len(answers), of.samples)]
    found: dict[str, float] = {"prompts": len(of.rows), "samples": of.samples}
    found["length"] = sum(answer.length for answer in answers) / len(answers)
    for name, (mean, low, high) in figures(rewards, of.ks, of.right).items():
        found[name] = mean
        if math.isfinite(high - low):
            found |= {f"{name}_low": low, f"{name}_high": high}
    return found
