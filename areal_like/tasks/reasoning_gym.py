"""The procedural data sets of reasoning_gym (Stojanovski et al., arXiv 2505.24760), one or a mixture of them.

A row's item follows from (seed, split, row); the verifier is the data set's own `score_answer`, in the reward pool. So
a run is replayable, and a resume continues with the same prompts. Needs `pip install reasoning-gym`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

import numpy as np

from areal_like.errors import UserError
from areal_like.tasks.generated import GeneratedPrompts
from areal_like.tasks.text import TextTask, Turns
from areal_like.types import Prompt


class Item(NamedTuple):
    """Where an item is: its data set, that one's config as JSON text, and its number there. As text: its answer."""

    name: str
    config: str
    number: int

    def __str__(self) -> str:
        from areal_like.tasks.procedural import item

        return str(item(*self)["answer"])


class ReasoningGym(TextTask, GeneratedPrompts):
    """Questions whose answers a program can check. Knobs of the text: see `areal_like.tasks.text`.

    dataset: its name, e.g. chain_sum; config: its keys, which set its difficulty. datasets: instead of both, a mixture,
        name → {weight (1), and the data set's keys}.
    extract: where the answer is in a response: "tags" (the last `<answer>...</answer>`, reasoning_gym's way) or "text"
        (all of it).
    system: may also name one of reasoning_gym's own: default, simple, direct, chain_of_draft, DeepSeekZero.
    train_size, heldout_size: rows of the splits, which share no prompt.
    """

    def __init__(
        self,
        seed: int,
        *,
        dataset: str | None = None,
        config: Mapping[str, object] | None = None,
        datasets: Mapping[str, Mapping[str, object]] | None = None,
        extract: Literal["tags", "text"] = "tags",
        train_size: Annotated[int, "[1, inf)"] = 1_000_000,
        heldout_size: Annotated[int, "[1, inf)"] = 1024,
        **text: object,
    ):
        if importlib.util.find_spec("reasoning_gym") is None:
            raise UserError("task=reasoning_gym needs the package: pip install 'areal_like[reasoning-gym]'")
        if (dataset is None) == (not datasets) or (datasets and config):
            raise ValueError("task: give task.dataset (with task.config), or a mixture in task.datasets")
        if extract not in ("tags", "text"):
            raise ValueError(f'task.extract must be "tags" or "text", got {extract!r}')
        TextTask.__init__(self, **text)  # type: ignore[arg-type]  # its knobs, checked by the registry
        self._extract: Literal["tags", "text"] = extract
        mixed = (
            {dataset: config or {}} if dataset else {name: dict(keys or {}) for name, keys in (datasets or {}).items()}
        )
        weights = np.array([keys.get("weight", 1) for keys in mixed.values()], float)
        if not (weights >= 0).all() or not 0 < weights.sum() < np.inf:
            raise ValueError(f"task.datasets: weights must be 0 or more, and not all 0, got {weights.tolist()}")
        self._shares = weights / weights.sum()
        self._configs = {
            str(name): json.dumps({key: value for key, value in keys.items() if key != "weight"}, sort_keys=True)
            for name, keys in mixed.items()
        }
        GeneratedPrompts.__init__(self, seed, train_size, heldout_size)

    def verification(self, prompt: Prompt, tokens: np.ndarray) -> tuple[str, tuple[object, ...], dict[str, object]]:
        """The verifier of a response, and its arguments."""
        return "areal_like.tasks.procedural:score", (*prompt.answer, self._text(tokens)), {"extract": self._extract}

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        """The same score, computed in this process."""
        from areal_like.tasks.procedural import score

        name, config, index = prompt.answer
        return score(name, config, index, self._text(tokens), extract=self._extract)

    def _draft(self, rng: np.random.Generator) -> tuple[bytes, Callable[[], Prompt]]:
        from areal_like.tasks.procedural import item

        name = list(self._configs)[int(rng.choice(len(self._shares), p=self._shares))]
        index = int(rng.integers(self._sizes_of_data[name]))
        answer = Item(name, self._configs[name], index)
        question = str(item(*answer)["question"])
        return question.encode(), lambda: self._prompt(f"{name}, item {index}", self._messages(question), answer)

    def _messages(self, prompt: str | list[dict[str, str]]) -> Turns:
        from areal_like.tasks.procedural import SYSTEM_PROMPTS

        self._system = SYSTEM_PROMPTS.get(self._system or "", self._system)  # not before: the package is slow to import
        return super()._messages(prompt)

    @cached_property
    def _sizes_of_data(self) -> dict[str, int]:
        """Name → items. Raises ValueError for a data set or a key that there is not."""
        from areal_like.tasks.procedural import dataset

        return {name: dataset(name, json.loads(config)).size for name, config in self._configs.items()}
