"""What a run knows about each prompt: how often it was drawn, and the results of its newest groups.

It is a fold over recorded events, applied by `buffer.store`. An admission counts as a draw, and a push gives a result.
Opening a batch makes all results so far visible, so with rounds the order in which groups finish does not decide the
draws. A resume undoes none of these events.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from buffer.events import ResultsState

WINDOW = 4
"""Results that are kept per prompt."""
HARD, RIGHT, EASY, NEW = "hard", "right", "easy", "new"
CLASSES = (HARD, RIGHT, EASY, NEW)
HARD_TO, EASY_FROM, MEMORY = 0.2, 0.8, 0.5
"""Where difficulty begins and ends for people, and for the pools unless their knobs say otherwise."""
PROMPT = np.dtype([("rates", "f8", WINDOW), ("answers", "i8", WINDOW), ("draws", "i8"), ("free", "?"), ("rows", "i8")])


class Known(NamedTuple):
    """The prompts of one task that were drawn before, n of them in the order of their first draw.

    rates: float64 (n, WINDOW), mean reward of each of its newest groups, newest first, rewards clipped to [0, 1]; NaN:
        no such group. answers: int64 (n, WINDOW), samples of these groups. draws: int64 (n,), how often it was drawn.
        free: bool (n,), True if it was not drawn since the newest batch was opened and was not in progress then. rows:
        int64 (n,), its row. new: how many prompts of the task were never drawn.
    """

    rates: NDArray[np.float64]
    answers: NDArray[np.int64]
    draws: NDArray[np.int64]
    free: NDArray[np.bool_]
    rows: NDArray[np.int64]
    new: int


def pass_rates(known: Known, memory: float = MEMORY) -> NDArray[np.float64]:
    """The pass rate of each prompt, float64 (n,); NaN without a result. A result counts `memory` times as much as the
    one after it. A fraction of a reward is a fraction of a right answer."""
    weights = known.answers * memory ** np.arange(WINDOW)
    right, answers = (np.nan_to_num(known.rates) * weights).sum(axis=1), weights.sum(axis=1)
    found = np.full(len(right), np.nan)
    np.divide(right, answers, out=found, where=answers > 0)
    return found


def classes(rates: NDArray[np.float64], hard_to: float = HARD_TO, easy_from: float = EASY_FROM) -> NDArray[np.int64]:
    """The places in `CLASSES` of prompts with these pass rates, int64 (n,)."""
    found = np.full(len(rates), CLASSES.index(RIGHT))
    found[rates >= easy_from] = CLASSES.index(EASY)
    found[rates <= hard_to] = CLASSES.index(HARD)
    found[np.isnan(rates)] = CLASSES.index(NEW)
    return found


class _Task:
    """`prompts`: a table that grows, with the drawn prompts first; `places`: where a row of the data is in it."""

    def __init__(self) -> None:
        self.places: dict[int, int] = {}
        self.prompts = _blank(16)

    def place(self, row: int) -> int:
        found = self.places.setdefault(row, len(self.places))
        if found == len(self.prompts):
            self.prompts = np.concatenate([self.prompts, _blank(max(16, found))])
        self.prompts["rows"][found] = row
        return found

    def add(self, row: int, rate: float, answers: int) -> None:
        place = self.place(row)
        for name, value in (("rates", rate), ("answers", answers)):
            column = self.prompts[name][place]
            column[1:] = column[:-1].copy()
            column[0] = value

    def known(self, size: int) -> Known:
        seen = self.prompts[: len(self.places)]
        seen.flags.writeable = False  # of this view
        return Known(**{name: seen[name] for name in seen.dtype.names or ()}, new=max(0, size - len(self.places)))

    def state(self) -> bytes:
        return self.prompts[: len(self.places)].tobytes()

    def load(self, state: bytes) -> None:
        self.prompts = np.frombuffer(state, PROMPT).copy()
        self.places = {row: place for place, row in enumerate(self.prompts["rows"].tolist())}


def _blank(size: int) -> np.ndarray:
    found = np.zeros(size, PROMPT)
    found["rates"], found["free"] = np.nan, True
    return found


class Results:
    """The results of all prompts, by task ("": the only one)."""

    def __init__(self) -> None:
        self._tasks: dict[str, _Task] = {}
        self._awaited: dict[int, tuple[str, int]] = {}
        self._fresh: list[tuple[int, str, int, float, int]] = []

    def known(self, task: str, size: int) -> Known:
        """The record of a task of `size` prompts: views, valid until the next event."""
        return self._task(task).known(size)

    def _task(self, name: str) -> _Task:
        return self._tasks.setdefault(name, _Task())

    def admit(self, group_id: int, task: str, row: int) -> None:
        """The prompt was drawn."""
        found = self._task(task)
        place = found.place(row)
        found.prompts["draws"][place] += 1
        found.prompts["free"][place] = False
        self._awaited[group_id] = task, row

    def push(self, group_id: int, task: str, row: int, rewards: Sequence[float]) -> None:
        """A group of the prompt was rolled out."""
        self._awaited.pop(group_id, None)
        self._fresh.append((group_id, task, row, float(np.clip(rewards, 0.0, 1.0).mean()), len(rewards)))

    def leave(self, group_id: int) -> None:
        """A group leaves, with or without a result."""
        self._awaited.pop(group_id, None)

    def open(self) -> None:
        """A batch is opened: all results so far become visible, in the order of their groups."""
        for _, task, row, rate, answers in sorted(self._fresh, key=lambda fresh: fresh[0]):
            self._task(task).add(row, rate, answers)
        self._fresh = []
        for found in self._tasks.values():
            found.prompts["free"] = True
        for task, row in self._awaited.values():
            found = self._task(task)
            found.prompts["free"][found.places[row]] = False

    def metrics(self) -> dict[str, float]:
        """Prompts with a result, and the shares of them that are hard, right and easy."""
        kinds = np.concatenate([classes(pass_rates(self.known(task, 0))) for task in self._tasks] or [np.empty(0, int)])
        counts = np.bincount(kinds, minlength=len(CLASSES))[: CLASSES.index(NEW)]
        shares = zip(CLASSES, counts / max(1, counts.sum()), strict=False)
        return {"prompts/known": float(counts.sum())} | {f"prompts/{name}": float(share) for name, share in shares}

    def state(self) -> ResultsState:
        return {name: task.state() for name, task in self._tasks.items()}, dict(self._awaited), list(self._fresh)

    def load(self, state: ResultsState) -> None:
        tasks, awaited, fresh = state
        self._tasks = {}
        for name, prompts in tasks.items():
            self._task(name).load(prompts)
        self._awaited, self._fresh = dict(awaited), list(fresh)
