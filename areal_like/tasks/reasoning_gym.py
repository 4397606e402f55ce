"""The procedural data sets of reasoning_gym (Stojanovski et al., arXiv 2505.24760).

A row's item follows from (seed, split, row); the verifier is the data set's own `score_answer`, in the reward pool.
"""

import importlib.util
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

import numpy as np

from areal_like.errors import UserError
from areal_like.tasks.generated import GeneratedPrompts
from areal_like.tasks.text import TextTask
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

    dataset: its name, e.g. chain_sum; config: its keys, which set its difficulty.
    extract: where the answer is in a response: "tags" (the last `<answer>...</answer>`) or "text" (all of it).
    train_size, heldout_size: rows of the splits, which share no prompt.
    """

    def __init__(
        self,
        seed: int,
        *,
        dataset: str,
        config: Mapping[str, object] | None = None,
        extract: Literal["tags", "text"] = "tags",
        train_size: Annotated[int, "[1, inf)"] = 1_000_000,
        heldout_size: Annotated[int, "[1, inf)"] = 1024,
        **text: object,
    ):
        if importlib.util.find_spec("reasoning_gym") is None:
            raise UserError("task=reasoning_gym needs the package: pip install 'areal_like[reasoning-gym]'")
        TextTask.__init__(self, **text)  # type: ignore[arg-type]  # its knobs, checked by the registry
        self._extract: Literal["tags", "text"] = extract
        self._place = dataset, json.dumps(dict(config or {}), sort_keys=True)
        GeneratedPrompts.__init__(self, seed, train_size, heldout_size)

    def verification(self, prompt: Prompt, tokens: np.ndarray) -> tuple[str, tuple[object, ...], dict[str, object]]:
        return (
            "areal_like.tasks.procedural:score",
            (*prompt.answer, prompt.codec.decode(tokens)),
            {"extract": self._extract},
        )

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        from areal_like.tasks.procedural import score

        name, config, index = prompt.answer
        return score(name, config, index, prompt.codec.decode(tokens), extract=self._extract)

    def _draft(self, rng: np.random.Generator) -> tuple[bytes, Callable[[], Prompt]]:
        from areal_like.tasks.procedural import item

        index = int(rng.integers(self._items))
        answer = Item(*self._place, index)
        question = str(item(*answer)["question"])
        return question.encode(), lambda: self._prompt(f"{answer.name}, item {index}", self._messages(question), answer)

    @cached_property
    def _items(self) -> int:
        """Raises ValueError for a data set or a key that there is not."""
        from areal_like.tasks.procedural import dataset

        return int(dataset(*self._place).size)
