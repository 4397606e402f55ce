"""Prompts for environments that need none: a row is an episode's seed (`seed_of`); the environment adds its text."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

import numpy as np
import xxhash

from areal_like.tasks.generated import GeneratedPrompts
from areal_like.tasks.text import TextTask
from areal_like.types import Prompt

SEEDS = 1 << 31


class Episodes(TextTask, GeneratedPrompts):
    """Seeds of episodes, for an environment that shows and rewards. Knobs of the text: see `areal_like.tasks.text`.

    instructions: text of every prompt, followed by the environment's first observation.
    train_size, heldout_size: rows of the splits, which share no seed.
    """

    needs_environment = True

    def __init__(
        self,
        seed: int,
        *,
        instructions: str = "",
        train_size: Annotated[int, "[1, inf)"] = 1_000_000,
        heldout_size: Annotated[int, "[1, inf)"] = 1024,
        **text: object,
    ):
        TextTask.__init__(self, **text)  # type: ignore[arg-type]  # its knobs, checked by the registry
        self._instructions = instructions
        GeneratedPrompts.__init__(self, seed, train_size, heldout_size)

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        """0: the environment rewards."""
        return 0.0

    def _draft(self, rng: np.random.Generator) -> tuple[bytes, Callable[[], Prompt]]:
        episode = int(rng.integers(SEEDS))
        messages = self._messages(self._instructions)
        return episode.to_bytes(4, "little"), partial(self._prompt, f"episode {episode}", messages, episode)


def seed_of(prompt: Prompt) -> int:
    """The seed of a prompt's episode, below `SEEDS`: its answer if that is one, else a hash of prompt and answer."""
    if isinstance(prompt.answer, int) and 0 <= prompt.answer < SEEDS:
        return prompt.answer
    content = np.asarray(prompt.tokens, np.int32).tobytes() + repr(prompt.answer).encode()
    return xxhash.xxh3_64_intdigest(content) % SEEDS
