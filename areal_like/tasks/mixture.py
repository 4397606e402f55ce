"""Several tasks in one run, with ratios: `task={name: mixture, tasks: {sums: {name: ...}, copy: {name: ...}}}`.

The rows of a split are those of the first task, then those of the second, and so on; a prompt names its task
(`Prompt.task`). `buffer.prompts` draws from them by ratio."""

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate

import numpy as np

from areal_like.config.registry import ConfigError, as_spec, build, check, within
from areal_like.interfaces import Task
from areal_like.types import Prompt

LONGEST_BLOCK = 1000
"""Largest ratio: the ratios hold exactly after as many prompts as their sum."""
ROWS = 256
"""Rows of a task that can't report its long rows, for a check of lengths."""
RESERVED = ("mean", "std", "p50", "p95", "max", "histogram", "train", "heldout")
"""Names that would be mistaken: of metrics (`reward/NAME`) and of splits."""
_NAME = re.compile(r"[A-Za-z][\w-]*")


class Mixture:
    """Mixes tasks of one vocabulary: `members` by name, `ratios` as the smallest whole numbers.

    tasks: name → task, `{name: ..., knobs}` or its bare name. ratios: name → prompts of it per block (default: 1).

    Raises ConfigError for names or ratios that don't fit, and for tasks whose tokens differ.
    """

    def __init__(
        self,
        seed: int,
        *,
        tasks: Mapping[str, str | Mapping[str, object]],
        ratios: Mapping[str, int] | None = None,
    ):
        check_members({"tasks": tasks, "ratios": ratios})
        self.members: dict[str, Task] = {}
        for name, spec in tasks.items():
            with within(f"task.tasks.{name}: ", "task.tasks"):
                self.members[name] = build("task", as_spec(spec), seed)
        self.ratios = smallest_ratios({name: (ratios or {}).get(name, 1) for name in tasks})
        first, *others = self.members
        for name in others:
            refuse_other_tokens(self.members[first], self.members[name], f"task.tasks: {first} and {name}")
        self.vocab_size, self.pad_token = self.members[first].vocab_size, self.members[first].pad_token
        self.stop_tokens = tuple(self.members[first].stop_tokens)
        self._ends = {s: [*accumulate(m.size(s) for m in self.members.values())] for s in ("train", "heldout")}

    def size(self, split: str) -> int:
        return self._ends[split][-1]

    def prompt(self, split: str, row: int) -> Prompt:
        name, inner = self._member(split, row)
        return replace(self.members[name].prompt(split, inner), task=name)

    def _member(self, split: str, row: int) -> tuple[str, int]:
        """The task of a row, and the row within that task. Raises IndexError."""
        if not 0 <= row < self.size(split):
            raise IndexError(f"row {row} of split {split!r}, which has {self.size(split)}")
        place = bisect_right(self._ends[split], row)
        return list(self.members)[place], row - ([0] + self._ends[split])[place]

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float | Mapping[str, float] | None:
        """For callers without a reward pool; actors use the members' own (`actors.rewards`)."""
        return await self.members[prompt.task].reward(prompt, tokens)

    def place(self, split: str, row: int) -> str:
        name, inner = self._member(split, row)
        own = getattr(self.members[name], "place", lambda split, row: f"row {row} of {split}")
        return f"{name}: {own(split, inner)}"

    def rows_beyond(self, split: str, tokens: int) -> Iterator[int]:
        """The rows whose prompt may have more than `tokens` tokens: the first `ROWS` of a task without this report."""
        for first, task in zip([0, *self._ends[split]], self.members.values(), strict=False):
            few = range(min(task.size(split), ROWS))
            rows = task.rows_beyond(split, tokens) if hasattr(task, "rows_beyond") else few
            yield from (first + row for row in rows)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token → id, of the first task with a tokenizer."""
        return next((task.vocabulary for task in self.members.values() if hasattr(task, "vocabulary")), {})

    def save_tokenizer(self, folder: str) -> None:
        """Beside a model, of the first task that has one."""
        found = next((task for task in self.members.values() if hasattr(task, "save_tokenizer")), None)
        if found:
            found.save_tokenizer(folder)


def check_members(knobs: Mapping[str, object]) -> None:
    """Check a mixture's knobs, as far as their text allows. Raises ConfigError."""
    tasks = knobs.get("tasks")
    if not isinstance(tasks, Mapping) or not tasks:
        raise ConfigError("task.tasks: want name → task, e.g. {sums: {name: arithmetic}}", "task.tasks")
    for name, spec in tasks.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in RESERVED:
            wanted = f"letters, digits, _ and -, a letter first, and none of {', '.join(RESERVED)}"
            raise ConfigError(f"task.tasks: {name!r} can't name a task; expected {wanted}", "task.tasks")
        key = f"task.tasks.{name}"
        if not isinstance(spec, str | Mapping):
            raise ConfigError(f"{key}: want {{name: ..., knobs}}, got {spec!r}", key)
        with within(f"{key}: ", key):
            check("task", as_spec(spec))
        if as_spec(spec)["name"] == "mixture":
            raise ConfigError(f"task.tasks.{name}: a mixture within a mixture; name its tasks here", "task.tasks")
    ratios = knobs.get("ratios") or {}
    if not isinstance(ratios, Mapping) or ratios.keys() - tasks.keys():
        wanted = f"a value for some of {', '.join(tasks)}"
        raise ConfigError(f"task.ratios: got {ratios!r}, expected {wanted}", "task.ratios")
    smallest_ratios({name: ratios.get(name, 1) for name in tasks})


def smallest_ratios(ratios: Mapping[str, object]) -> dict[str, int]:
    """The smallest whole numbers with the same ratios. Raises ConfigError."""
    counts: dict[str, int] = {}
    for name, ratio in ratios.items():
        if type(ratio) is not int or not 0 < ratio <= LONGEST_BLOCK:
            problem = f"got {ratio!r}, expected a whole number from 1 to {LONGEST_BLOCK}"
            raise ConfigError(f"task.ratios.{name}: {problem}", "task.ratios")
        counts[name] = ratio
    shared = math.gcd(*counts.values())
    return {name: count // shared for name, count in counts.items()}


def refuse_other_tokens(one: Task, other: Task, where: str) -> None:
    """Raises ConfigError unless both tasks write the same tokens, and end with the same ones."""
    for what in ("vocab_size", "pad_token", "stop_tokens"):
        ours, theirs = getattr(one, what), getattr(other, what)
        if ours != theirs:
            problem = f"{where} can't be mixed: {what} is {ours} and {theirs}; give them the same tokenizer"
            raise ConfigError(problem, where.partition(":")[0])
