"""Text for models with a tokenizer, as it stands or in its chat template (`areal_like.interfaces.Codec`).

What the model has said is never encoded again: a reply is only the tokens that come after it, found by rendering a
conversation with and without the new message.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

_SAID = "What the model said."


class TokenizerCodec:
    """`tokenizer` is one of transformers; with `chat` a reply is a message of the user's."""

    def __init__(self, tokenizer: Any, chat: bool):
        self._tokenizer, self._chat = tokenizer, chat

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True)

    def reply(self, text: str, *, closed: bool = True) -> np.ndarray:
        """Raises ValueError for a chat template that changes earlier turns when another follows."""
        if not self._chat:
            return self.encode(text)
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
        before = self._render(talk)
        after = self._render([*talk, {"role": "user", "content": text}], add_generation_prompt=True)
        said = before.rpartition(_SAID)[0] + _SAID
        if not after.startswith(said):
            raise ValueError("the chat template writes earlier turns differently when another follows: no multi_turn")
        rest = after[len(said) :]
        return self.encode(rest.removeprefix(self._end) if closed else rest)

    @cached_property
    def _end(self) -> str:
        """Of a turn, as the model itself writes it."""
        return self._tokenizer.eos_token or ""

    def _render(self, messages: list[dict[str, str]], **more: Any) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **more)
