"""Prompts made from (seed, split, row), for tasks whose prompts are drawn at random instead of read from a file.

A row's prompt depends on nothing else, so every process sees the same prompts without communication. A hash of
the prompt's *content* chooses the split that it may appear in, and rows are drawn again until theirs allows them: the
two splits share no prompt, by construction. Within a split a prompt may recur (with few possible prompts it must).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import xxhash

from areal_like.interfaces import Codec
from areal_like.sampling import stream_key
from areal_like.tasks.length_trace import trace_of
from areal_like.types import Demonstration, Prompt

SPLITS = ("train", "heldout")
_HELDOUT_ONE_IN = 10
_MAX_DRAWS = 2000
"""Draws before a split counts as empty: a held-out share of 1/10 misses this often once in 10^91."""


class GeneratedPrompts(ABC):
    """The base of tasks with generated prompts; a subclass draws one (`_draft`).

    Raises ValueError for an unknown split, and where the task has so few different prompts that none falls into a
    split; IndexError for a row outside its split.
    """

    def __init__(self, seed: int, train_size: int, heldout_size: int, trace: Mapping[str, float] | None = None):
        if train_size < 1 or heldout_size < 1:
            raise ValueError(f"train_size and heldout_size must be at least 1, got {train_size} and {heldout_size}")
        self._seed = seed
        self._sizes = {"train": train_size, "heldout": heldout_size}
        self._trace = trace_of(trace)
        self._heldout: dict[int, Prompt] = {}

    def size(self, split: str) -> int:
        if split not in self._sizes:
            raise ValueError(f"unknown split {split!r}; the splits are {', '.join(SPLITS)}")
        return self._sizes[split]

    def prompt(self, split: str, row: int) -> Prompt:
        if not 0 <= row < self.size(split):
            raise IndexError(f"row {row} of split {split!r}, which has {self.size(split)}")
        if split != "heldout":
            return self._made(split, row)
        if row not in self._heldout:  # asked for in every evaluation, and drawn about ten times
            self._heldout[row] = self._made(split, row)
        return self._heldout[row]

    def _made(self, split: str, row: int) -> Prompt:
        for attempt in range(_MAX_DRAWS):
            key = stream_key(self._seed, SPLITS.index(split), row, attempt)
            drawn, make = self._draft(np.random.Generator(np.random.Philox(key=key)))
            content = xxhash.xxh3_64_intdigest(drawn, seed=stream_key(self._seed))
            if (content % _HELDOUT_ONE_IN == 0) == (split == "heldout"):
                return replace(make(), filler=self._trace.lengths(content)) if self._trace else make()
        raise ValueError(f"the task has too few different prompts: none falls into the split {split!r}")

    @abstractmethod
    def _draft(self, rng: np.random.Generator) -> tuple[bytes, Callable[[], Prompt]]:
        """The content of a random prompt, and how to make it, without filler: only one in ten may be held out."""


class GeneratedTask(GeneratedPrompts):
    """The base of those whose tokens are made, not encoded; a subclass draws and scores a prompt."""

    codec: Codec | None = None
    """Where the tokens are text."""

    def __init__(self, seed: int, train_size: int, heldout_size: int, trace: Mapping[str, float] | None):
        """A subclass calls this last: it draws a prompt of each split, so that an empty one shows at once."""
        super().__init__(seed, train_size, heldout_size, trace)
        for split in SPLITS:
            self.prompt(split, 0)

    def _draft(self, rng: np.random.Generator) -> tuple[bytes, Callable[[], Prompt]]:
        tokens, answer = self._draw(rng)
        return tokens.tobytes(), lambda: self._prompt(tokens, answer)

    def _prompt(self, tokens: np.ndarray, answer: object) -> Prompt:
        messages = ({"role": "user", "content": self.codec.decode(tokens)},) if self.codec else ()
        return Prompt(tokens, answer, self._max_tokens(), (), self.codec, messages)

    @abstractmethod
    def _draw(self, rng: np.random.Generator) -> tuple[np.ndarray, object]:
        """One random prompt: its tokens (int32 [P]) and its answer."""

    @abstractmethod
    def _max_tokens(self) -> int:
        """The longest response that makes sense; the same for all rows, so that it gives no answer away."""


def answered(prompt: Prompt, stop_tokens: tuple[int, ...]) -> Demonstration:
    """A prompt whose answer is the tokens of the right response, and that response, ended with the first stop token if
    there is one."""
    tokens = np.append(prompt.answer, stop_tokens[:1]).astype(np.int32)
    return Demonstration(prompt, tokens, np.ones(len(tokens), bool))


def until_stop(tokens: np.ndarray, stop: int) -> np.ndarray:
    """The tokens before the first `stop`; all of them where there is none."""
    ends = np.flatnonzero(tokens == stop)
    return tokens[: ends[0]] if len(ends) else tokens
