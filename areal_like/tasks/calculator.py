"""Calculator: products that are too hard to learn, and a desk calculator to ask. The smallest task with a tool.

The prompt is `a*b=`. A turn that ends with `=` is a call: the desk calculates the text before it and shows the model
its display, `00408|`. A turn that ends with `|` is the answer; it is right if it equals the right display.
`Desk` is the environment. With the workflow `single_turn` the model must solve the same task without the desk.

Why this format: a model from random weights finds the text to copy by its position. The display has one place more than
both factors together. So an answer is as far from the display as a call is from the prompt, and the end marks are
copied with the line. What the model learns about calls then also helps with answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np

from areal_like.tasks.characters import CharacterCodec
from areal_like.tasks.expressions import evaluate
from areal_like.tasks.generated import GeneratedTask
from areal_like.types import Outcome, Prompt

CHARACTERS = "0123456789+-*=|?"
"""Token i is character i; `?` is what the desk shows for a call that it does not understand."""
CALL_ENDS = CHARACTERS.index("=")
EOS = CHARACTERS.index("|")
PAD = len(CHARACTERS)


class Characters(CharacterCodec):
    def __init__(self) -> None:
        super().__init__(CHARACTERS)

    def decode(self, tokens: np.ndarray) -> str:
        """Without an EOS at the end. PAD reads as `?`: left out, it would make digits with PAD between them right."""
        return super().decode(np.where(tokens == PAD, CHARACTERS.index("?"), tokens)).removesuffix("|")


class Calculator(GeneratedTask):
    """digits: of both factors, which are uniform in 10^(digits−1) … 10^digits − 1. max_tokens: of a whole response, the
    desk's words included; by default two calls fit in. train_size, heldout_size: rows of the splits.
    length_trace: see `areal_like.tasks.length_trace`.

    Reward of an answer out of the head (`single_turn`): the share of right digits in place from the left, out of the
    longer of answer and result, leading zeros included.
    """

    vocab_size = PAD + 1
    pad_token = PAD
    stop_tokens: tuple[int, ...] = (EOS, CALL_ENDS)
    codec = Characters()

    def __init__(
        self,
        seed: int,
        *,
        digits: Annotated[int, "[1, 9]"] = 2,
        max_tokens: Annotated[int, "[1, inf)"] | None = None,
        train_size: Annotated[int, "[1, inf)"] = 1_000_000,
        heldout_size: Annotated[int, "[1, inf)"] = 1024,
        length_trace: Mapping[str, float] | None = None,
    ):
        if not 1 <= digits <= 9:
            raise ValueError(f"digits must be 1 to 9, got {digits}")
        self._digits = digits
        self._places = 2 * digits + 1
        self._longest = 5 * (self._places + 1) if max_tokens is None else max_tokens
        super().__init__(seed, train_size, heldout_size, length_trace)

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        return share_in_place(Characters().decode(tokens), prompt.answer)

    def _draw(self, rng: np.random.Generator) -> tuple[np.ndarray, str]:
        a, b = (int(n) for n in rng.integers(10 ** (self._digits - 1), 10**self._digits, size=2))
        return Characters().encode(f"{a}*{b}="), str(a * b).zfill(self._places)

    def _max_tokens(self) -> int:
        return self._longest


class Desk:
    """The calculator beside the model: an `Environment`.

    call_credit: share of the reward that the first turn can earn, by being a call of what the prompt asks for
        (character by character): a model that starts at random needs it to find the tool at all. The answer earns the
        rest.
    credit: of the answer: "digits" earns by the share of right ones in place, "exact" all or nothing. In the first
        turn, before anything was asked, it is all or nothing anyway: the zeros that results begin with could be
        guessed, and a model that lives on them never asks. `call_credit` 0 and "exact" give the plain rate of success.
    """

    def __init__(self, *, call_credit: Annotated[float, "[0, 1)"] = 0.5, credit: Literal["digits", "exact"] = "digits"):
        if not 0 <= call_credit < 1:
            raise ValueError(f"environment.call_credit must be in [0, 1), got {call_credit}")
        if credit not in ("digits", "exact"):
            raise ValueError(f'environment.credit must be "digits" or "exact", got {credit!r}')
        self._credit, self._exact = call_credit, credit == "exact"
        self._question = self._result = ""
        self._turns = 0

    def reset(self, prompt: Prompt) -> str:
        self._question, self._result = prompt.codec.decode(prompt.tokens), prompt.answer
        return ""

    def step(self, action: str) -> Outcome:
        self._turns += 1
        is_call = action.endswith("=")
        earned = self._credit * share_in_place(action, self._question) if self._turns == 1 else 0.0
        if not is_call:
            whole = self._exact or self._turns == 1
            right = float(action == self._result) if whole else share_in_place(action, self._result)
            return Outcome("", earned + (1 - self._credit) * right, True)
        return Outcome(f"{_calculated(action[:-1], len(self._result))}|", earned, False)


def _calculated(expression: str, places: int) -> str:
    """The result with leading zeros, or `?` where there is none that the desk can write."""
    try:
        result = evaluate(expression)
    except ValueError:
        return "?"
    return result.zfill(places) if set(result) <= set(CHARACTERS) else "?"


def share_in_place(given: str, wanted: str) -> float:
    """Of characters that are the same in the same place, out of the longer text."""
    same = sum(a == b for a, b in zip(given, wanted, strict=False))
    return same / max(len(given), len(wanted))
