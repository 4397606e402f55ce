"""Copy and Reverse: repeat the digits of the prompt, forwards or backwards.

The prompt is `digits SEP`, as text `digits>`. With a fixed length the response is exactly `digits` tokens and nothing
stops it early; with `min_digits` the length varies and the response must end with EOS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np

from areal_like.tasks.characters import CharacterCodec
from areal_like.tasks.generated import GeneratedTask, answered, until_stop
from areal_like.types import Demonstration, Prompt

DIGITS = 10
SEP, EOS, PAD = 10, 11, 12


class Copy(GeneratedTask):
    """The answer is the prompt's digits (tokens 0–9).

    Reward, EOS excluded: `credit="digits"` (the default) gives the share of right positions, out of the longer of
    response and answer. So a response of variable length earns 1 only if it also stops in time. `credit="exact"` gives
    1 for the whole answer and 0 otherwise.

    digits: length, or the longest length where `min_digits` is given (then uniform in min_digits..digits). With
    `digits=1` one of the ten prompts is held out: no training prompt has its digit, so the held-out reward falls to 0.
    train_size, heldout_size: rows of the splits. length_trace: see `areal_like.tasks.length_trace`.
    """

    vocab_size = 13
    pad_token = PAD
    codec = CharacterCodec("0123456789>")

    def __init__(
        self,
        seed: int,
        *,
        digits: Annotated[int, "[1, inf)"] = 8,
        min_digits: Annotated[int, "[1, inf)"] | None = None,
        credit: Literal["digits", "exact"] = "digits",
        train_size: Annotated[int, "[1, inf)"] = 1_000_000,
        heldout_size: Annotated[int, "[1, inf)"] = 1024,
        length_trace: Mapping[str, float] | None = None,
    ):
        if not 1 <= (digits if min_digits is None else min_digits) <= digits:
            raise ValueError(f"want 1 <= min_digits <= digits, got min_digits={min_digits}, digits={digits}")
        self._digits, self._exact = digits, credit == "exact"
        self._min_digits = min_digits
        self.stop_tokens: tuple[int, ...] = () if min_digits is None else (EOS,)
        super().__init__(seed, train_size, heldout_size, length_trace)

    def demonstration(self, split: str, row: int) -> Demonstration:
        return answered(self.prompt(split, row), self.stop_tokens)

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        given = until_stop(tokens, EOS) if self.stop_tokens else tokens
        if self._exact:
            return float(np.array_equal(given, prompt.answer))
        both = min(len(given), len(prompt.answer))
        right = np.count_nonzero(given[:both] == prompt.answer[:both])
        return float(right / max(len(given), len(prompt.answer)))

    def _draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        low = self._digits if self._min_digits is None else self._min_digits
        digits = rng.integers(DIGITS, size=rng.integers(low, self._digits + 1), dtype=np.int32)
        return np.append(digits, np.int32(SEP)), self._answer(digits)

    def _max_tokens(self) -> int:
        return self._digits + len(self.stop_tokens)

    def _answer(self, digits: np.ndarray) -> np.ndarray:
        return digits


class Reverse(Copy):
    """As Copy; the answer is the prompt's digits backwards."""

    def _answer(self, digits: np.ndarray) -> np.ndarray:
        return digits[::-1]
