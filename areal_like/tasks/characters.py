"""Text whose tokens are characters, for generated tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


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
