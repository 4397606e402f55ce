"""Copy and Reverse: repeat the digits of the prompt, forwards or backwards. The prompt is `digits SEP`, as text
`digits>`; the response is exactly `digits` tokens, and nothing stops it early."""

from typing import Annotated, Any

import numpy as np

from areal_like.tasks.generated import CharacterCodec, GeneratedTask, share_in_place
from areal_like.types import Prompt

DIGITS = 10
SEP, PAD = 10, 12


class Copy(GeneratedTask):
    """The answer is the prompt's digits (tokens 0–9). Reward: the share of right positions.

    digits: their number. With `digits=1` one of the ten prompts is held out: no training prompt has its digit, so the
    held-out reward falls to 0. Other knobs: see `areal_like.tasks.generated.GeneratedTask`.
    """

    vocab_size = 13
    pad_token = PAD
    codec = CharacterCodec("0123456789>")

    def __init__(self, seed: int, *, digits: Annotated[int, "[1, inf)"] = 8, **rows: Any):
        self._digits = digits
        super().__init__(seed, **rows)

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        return share_in_place(tokens, prompt.answer)

    def _draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        digits = rng.integers(DIGITS, size=self._digits, dtype=np.int32)
        return np.append(digits, np.int32(SEP)), self._answer(digits)

    def _max_tokens(self) -> int:
        return self._digits

    def _answer(self, digits: np.ndarray) -> np.ndarray:
        return digits


class Reverse(Copy):
    """As Copy; the answer is the prompt's digits backwards."""

    def _answer(self, digits: np.ndarray) -> np.ndarray:
        return digits[::-1]
