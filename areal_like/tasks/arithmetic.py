"""Arithmetic: `a + b =` to the digits of the sum, then EOS. No leading zeros; most significant digit first."""

from typing import Annotated, Any

import numpy as np

from areal_like.tasks.generated import GeneratedTask, share_in_place
from areal_like.types import Prompt

PLUS, EQUALS, EOS, PAD = 10, 13, 14, 15


class Arithmetic(GeneratedTask):
    """The answer is the sum's digits (tokens 0–9), ended by EOS.

    Reward, EOS excluded: the share of right digits, aligned at the least significant one, out of the longer of response
    and answer: a model that starts at random needs the partial credit to get any signal.

    digits: operands are uniform in 0..10^digits − 1. Other knobs: see `areal_like.tasks.generated.GeneratedTask`.
    """

    vocab_size = 16
    pad_token = PAD
    stop_tokens: tuple[int, ...] = (EOS,)

    def __init__(self, seed: int, *, digits: Annotated[int, "[1, 9]"] = 2, **rows: Any):
        self._digits = digits
        super().__init__(seed, **rows)

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        ends = np.flatnonzero(tokens == EOS)
        given = tokens[: ends[0]] if len(ends) else tokens
        return share_in_place(given[::-1], prompt.answer[::-1])

    def _draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        a, b = (int(n) for n in rng.integers(10**self._digits, size=2))
        first, second, result = ([int(digit) for digit in str(number)] for number in (a, b, a + b))
        return np.array([*first, PLUS, *second, EQUALS], np.int32), np.array(result, np.int32)

    def _max_tokens(self) -> int:
        return self._digits + 2  # a carry and EOS
