"""Copy and Reverse: repeat the digits of the prompt, forwards or backwards. The prompt is `digits SEP`, as text
`digits>`; the response is exactly `digits` tokens, and nothing stops it early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from areal_like.tasks.generated import GeneratedTask, share_in_place
from areal_like.types import Prompt

DIGITS = 10
SEP, PAD = 10, 12


class CharacterCodec:
    """Text whose tokens are characters (`areal_like.interfaces.Codec`): token i is character i. Ids beyond are no text:
    they end a turn, or fill a batch. There are no roles: a conversation is the contents of its messages."""

    def __init__(self, characters: str):
        self._characters = characters
        self._places = {character: token for token, character in enumerate(characters)}

    def encode(self, text: str) -> np.ndarray:
        """Raises ValueError for a character that the task does not have."""
        unknown = [character for character in text if character not in self._places]
        if unknown:
            raise ValueError(f"there is no token for {unknown[0]!r}; there are {self._characters}")
        return np.array([self._places[character] for character in text], np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return "".join(self._characters[token] for token in tokens.tolist() if token < len(self._characters))

    def reply(self, text: str, *, closed: bool = True) -> np.ndarray:
        return self.encode(text)

    def opening(self, messages: Sequence[Mapping[str, object]], tools: Sequence[object] = ()) -> np.ndarray:
        """Raises ValueError for `tools`: there is no place for them."""
        if tools:
            raise ValueError("this task's text has no place for tools")
        return self.encode("".join(str(message["content"]) for message in messages))

    def continuation(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[object] = (), *, closed: bool = True
    ) -> np.ndarray:
        return self.opening(messages, tools)

    def rewrites(self, said: str, messages: Sequence[Mapping[str, object]], tools: Sequence[object] = ()) -> bool:
        return False


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
