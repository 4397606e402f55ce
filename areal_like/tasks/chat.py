"""Text for models with a tokenizer, as it stands or in its chat template. The model's own tokens are never encoded
again: a reply is only the tokens behind them, found by rendering a conversation up to the new message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

_THOUGHT, _SAID = "What the model thought.", "What the model said."
_THINKS = "</think>"
"""Ends the thinking in an answer."""
Messages = Sequence[Mapping[str, object]]


class Tokenizer(Protocol):
    """The used part of one of transformers."""

    chat_template: str | None
    eos_token: str | None
    eos_token_id: int | None
    pad_token_id: int | None

    def __len__(self) -> int: ...
    def get_vocab(self) -> dict[str, int]: ...
    def save_pretrained(self, folder: str) -> object: ...
    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, tokens: list[int], /, *, skip_special_tokens: bool = False) -> str: ...
    def apply_chat_template(self, talk: list[Mapping[str, object]], /, *, tokenize: bool, **more: object) -> str: ...


def whole(text: str) -> str:
    """With `?` for halves of characters (lone surrogates), which JSON and undecoded bytes may bring, and no tokenizer
    takes."""
    return text.encode(errors="replace").decode()


def stop_tokens(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokenizer's EOS, and those that `generation_config.json` of its folder adds; may be none."""
    file = folder / "generation_config.json"
    more = json.loads(file.read_text()).get("eos_token_id", []) if file.is_file() else []
    stops = [tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]
    return tuple(dict.fromkeys(stop for stop in stops if stop is not None))


class TokenizerCodec:
    """`tokenizer` is one of transformers; with `chat` a reply is a message of the user's."""

    def __init__(self, tokenizer: Tokenizer, chat: bool):
        self._tokenizer, self._chat = tokenizer, chat

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(whole(text), add_special_tokens=False), np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True)

    def reply(self, text: str, *, closed: bool = True) -> np.ndarray:
        """Raises ValueError for a chat template that leaves earlier turns out."""
        return self.continuation([{"role": "user", "content": text}], closed=closed)

    def opening(self, messages: Messages, tools: Sequence[object] = ()) -> np.ndarray:
        """Raises ValueError for messages that the chat template does not take, or tools without a template."""
        if not self._chat:
            return np.array(self._tokenizer.encode(whole(_as_they_stand(messages, tools))), np.int32)
        return self.encode(self._render(messages, tools, add_generation_prompt=True))

    def continuation(self, messages: Messages, tools: Sequence[object] = (), *, closed: bool = True) -> np.ndarray:
        """Raises ValueError as `reply` and `opening`."""
        if not self._chat:
            return self.encode(_as_they_stand(messages, tools))
        _, said, rest = self._render([*_talk(_SAID), *messages], tools, add_generation_prompt=True).rpartition(_SAID)
        if not said:
            raise ValueError("the chat template leaves out earlier turns: they can't be continued")
        return self.encode(rest.removeprefix(self._tokenizer.eos_token or "") if closed else rest)

    def rewrites(self, said: str, messages: Messages, tools: Sequence[object] = ()) -> bool:
        """Templates of reasoning models drop the reasoning of earlier turns, some of them only when a user speaks."""
        if not self._chat:
            return False
        answer = f"<think>\n{_THOUGHT}\n{_THINKS}\n\n{_SAID}" if _THINKS in said else _SAID
        talk = _talk(answer)
        begun = self._render(talk[:-1], tools, add_generation_prompt=True)
        if _THINKS in said and begun.rstrip().endswith("<think>"):  # the template opens it
            answer = answer.removeprefix("<think>")
        after = self._render([*talk, *messages], tools, add_generation_prompt=True)
        after, before = ("".join(text.split()) for text in (after, begun + answer))  # templates differ in white space
        return not after.startswith(before)

    def _render(self, messages: Messages, tools: Sequence[object] = (), **more: object) -> str:
        from jinja2 import TemplateError

        given = {"tools": list(tools)} if tools else {}
        try:
            return self._tokenizer.apply_chat_template(list(messages), tokenize=False, **given, **more)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template does not take these messages: {error}") from None


def _talk(answer: str) -> list[Mapping[str, object]]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]


def _as_they_stand(messages: Messages, tools: Sequence[object]) -> str:
    if tools:
        raise ValueError("tools need a chat template (task.chat_template)")
    return "".join(str(message["content"]) for message in messages)
