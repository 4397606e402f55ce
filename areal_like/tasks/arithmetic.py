"""Arithmetic: `a + b =` to the digits of the result, then EOS. No leading zeros; most significant digit first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np

from areal_like.tasks.generated import GeneratedTask, answered, until_stop
from areal_like.types import Demonstration, Prompt

OPERATORS = "+-*"
EQUALS, EOS, PAD = 13, 14, 15


class Arithmetic(GeneratedTask):
    """The answer is the result's digits (tokens 0–9; 10–12 are the operators), ended by EOS.

    Reward, EOS excluded: `credit="digits"` (the default) gives the share of right digits, aligned at the least
    significant one, out of the longer of response and answer: a model that starts at random needs the partial credit
    to get any signal. `credit="exact"` gives 1 for the whole answer and 0 otherwise.

    digits: operands are uniform in 0..10^digits − 1; of a difference the larger comes first.
    operators: those to draw from, of "+-*". train_size, heldout_size: rows of the splits.
    length_trace: see `areal_like.tasks.length_trace`.
    """

    vocab_size = 16
    pad_token = PAD
    stop_tokens: tuple[int, ...] = (EOS,)

    def __init__(
        self,
        seed: int,
        *,
        digits: Annotated[int, "[1, 9]"] = 2,  # results are 64-bit integers
        operators: str = "+",
        credit: Literal["digits", "exact"] = "digits",
        train_size: Annotated[int, "[1, inf)"] = 1_000_000,
        heldout_size: Annotated[int, "[1, inf)"] = 1024,
        length_trace: Mapping[str, float] | None = None,
    ):
        if not operators or set(operators) - set(OPERATORS):
            raise ValueError(f"operators must be some of {OPERATORS!r}, got {operators!r}")
        self._digits = digits
        self._operators = operators
        self._exact = credit == "exact"
        super().__init__(seed, train_size, heldout_size, length_trace)

    def demonstration(self, split: str, row: int) -> Demonstration:
        return answered(self.prompt(split, row), self.stop_tokens)

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        given, answer = until_stop(tokens, EOS), prompt.answer
        if self._exact:
            return float(np.array_equal(given, answer))
        both = min(len(given), len(answer))
        right = np.count_nonzero(given[::-1][:both] == answer[::-1][:both])
        return float(right / max(len(given), len(answer)))

    def _draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        operator = self._operators[rng.integers(len(self._operators))]
        a, b = (int(n) for n in rng.integers(10**self._digits, size=2))
        if operator == "-":
            a, b = max(a, b), min(a, b)
        result = {"+": a + b, "-": a - b, "*": a * b}[operator]
        tokens = [*_digits_of(a), 10 + OPERATORS.index(operator), *_digits_of(b), EQUALS]
        return np.array(tokens, np.int32), np.array(_digits_of(result), np.int32)

    def _max_tokens(self) -> int:
        longest = 2 * self._digits if "*" in self._operators else self._digits + ("+" in self._operators)
        return longest + 1


def _digits_of(number: int) -> list[int]:
    return [int(digit) for digit in str(number)]
