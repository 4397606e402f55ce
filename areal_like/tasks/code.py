"""Code: complete `def f(a, b): return a ? b` so that it passes its unit tests, which are run in the sandbox.

A prompt names the operation and the two parameters; the response is one token, the operator. The task is small enough
to learn from random weights. Its reward makes it as hard to schedule as any coding task: it takes a process per sample,
much longer than the sample's decoding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np

from areal_like.tasks.generated import GeneratedTask
from areal_like.types import Prompt

OPERATORS = ("+", "-", "*", "//", "%", "|", "&", "^")
NAMES = tuple("abcdefgh")
_PARAMETERS = len(OPERATORS) * 2
"""Tokens: a word for each operator, the operators, the names, PAD."""
PAD = _PARAMETERS + len(NAMES)
VERIFIER = "areal_like.tasks.unit_tests:unit_tests"
_CASES = [(7, 2), (12, 5), (3, 3), (9, 4)]


class Code(GeneratedTask):
    """Prompts `[word, x, y]`: 8 words (one per operator) times 56 pairs of different names. Reward: the share of four
    cases that pass, out of the sandbox.

    isolation: see `areal_like.tasks.sandbox`. seconds: wall time of a program. train_size, heldout_size: rows of the
    splits. length_trace: see `areal_like.tasks.length_trace`.
    """

    vocab_size = PAD + 1
    pad_token = PAD
    stop_tokens: tuple[int, ...] = ()

    def __init__(
        self,
        seed: int,
        *,
        isolation: Literal["full", "weak"] = "full",
        seconds: Annotated[float, "(0, inf)"] = 5.0,
        train_size: Annotated[int, "[1, inf)"] = 1_000_000,
        heldout_size: Annotated[int, "[1, inf)"] = 64,
        length_trace: Mapping[str, float] | None = None,
    ):
        self._extra = {"credit": "share", "isolation": isolation, "seconds": seconds}
        super().__init__(seed, train_size, heldout_size, length_trace)

    def verification(self, prompt: Prompt, tokens: np.ndarray) -> tuple[str, tuple[str, str]]:
        """The verifier, and its arguments (tests, program)."""
        x, y = (NAMES[token - _PARAMETERS] for token in prompt.tokens[1:])
        body = f"{x} {' '.join(map(_text, tokens))} {y}"
        return VERIFIER, (json.dumps(prompt.answer | self._extra), f"def f({x}, {y}):\n    return {body}\n")

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        """The same score, computed in this process: it waits for the program."""
        from areal_like.tasks.unit_tests import unit_tests

        return unit_tests(*self.verification(prompt, tokens)[1])

    def _draw(self, rng: np.random.Generator) -> tuple[np.ndarray, dict[str, object]]:
        operator = int(rng.integers(len(OPERATORS)))
        x, y = (int(n) for n in rng.choice(len(NAMES), size=2, replace=False))
        cases = [[[a, b], _value(OPERATORS[operator], a, b)] for a, b in _CASES]
        return np.array([operator, _PARAMETERS + x, _PARAMETERS + y], np.int32), {"function": "f", "cases": cases}

    def _max_tokens(self) -> int:
        return 1


def _value(operator: str, a: int, b: int) -> int:
    values = (a + b, a - b, a * b, a // b, a % b, a | b, a & b, a ^ b)
    return values[OPERATORS.index(operator)]


def _text(token: int) -> str:
    """A token in a program. Words of prompts and PAD are no Python."""
    if len(OPERATORS) <= token < _PARAMETERS:
        return OPERATORS[token - len(OPERATORS)]
    return NAMES[token - _PARAMETERS] if _PARAMETERS <= token < PAD else "?"
