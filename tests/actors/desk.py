"""A task of products and a desk calculator as its environment. A turn that ends with `=` is a call, which the desk
answers with its display, `00408|`; a turn that ends with `|` is the answer."""

import numpy as np

from actors.tools import calculator
from areal_like.interfaces import Outcome
from areal_like.tasks.generated import CharacterCodec
from areal_like.types import Prompt

CHARACTERS = "0123456789+-*=|?"
CALL_ENDS, EOS = CHARACTERS.index("="), CHARACTERS.index("|")
STOP = (EOS, CALL_ENDS)


class Characters(CharacterCodec):
    def __init__(self) -> None:
        super().__init__(CHARACTERS)

    def decode(self, tokens: np.ndarray) -> str:
        return super().decode(tokens).removesuffix("|")


class Desk:
    """`call_credit` of the reward is for the first call, by its characters; the answer earns the rest."""

    def __init__(self, *, call_credit: float = 0.5):
        self._credit, self._turns = call_credit, 0

    def reset(self, prompt: Prompt) -> str:
        self._question, self._result = prompt.codec.decode(prompt.tokens), prompt.answer
        return ""

    def step(self, action: str) -> Outcome:
        self._turns += 1
        earned = self._credit * share_in_place(action, self._question) if self._turns == 1 else 0.0
        if action.endswith("="):
            try:
                shown = calculator(action[:-1]).zfill(len(self._result))
            except ValueError:
                shown = "?"
            return Outcome(f"{shown}|", earned, False)
        right = share_in_place(action, self._result) if self._turns > 1 else float(action == self._result)
        return Outcome("", earned + (1 - self._credit) * right, True)


def share_in_place(given: str, wanted: str) -> float:
    """Fraction of positions at which both texts agree, relative to the longer one."""
    return sum(a == b for a, b in zip(given, wanted, strict=False)) / max(len(given), len(wanted))
