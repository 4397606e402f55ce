"""Text for models with a tokenizer, as it stands or in its chat template. The model's own tokens are never encoded
again: a reply is only the tokens behind them, found by rendering a conversation up to the new message. Control tokens
in the text of others (users, tools) are text: they open and end no turn. Without a template that is so for replies: a
prompt is encoded as it stands, as it may be a rendered conversation."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

Message = TypeVar("Message", bound=Mapping[str, Any])
Messages = Sequence[Mapping[str, object]]
ROLE = re.compile(r"[\w-]+")
Tokenizer = Any
"""One of transformers."""
_SAID = "What the model said."
_ASKED = {"role": "user", "content": "?"}
_TALK: Messages = [_ASKED, {"role": "assistant", "content": _SAID}]
_SPLIT = "\ufdd0"
"""Stands within control tokens in the text of others, so that they are encoded as two texts; Unicode assigns it no
character."""


def whole(text: str) -> str:
    """With `?` for halves of characters (lone surrogates), which JSON and undecoded bytes may bring, and no tokenizer
    takes."""
    return text.encode(errors="replace").decode()


def stop_tokens(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokenizer's EOS, those that `generation_config.json` of its folder adds, and the one that its chat template
    writes behind an answer; may be none."""
    file = folder / "generation_config.json"
    more = json.loads(file.read_bytes()).get("eos_token_id", []) if file.is_file() else []
    turn_end = TokenizerCodec(tokenizer, bool(tokenizer.chat_template)).turn_end
    stops = [tokenizer.eos_token_id, *(more if isinstance(more, list) else [more]), turn_end]
    return tuple(dict.fromkeys(stop for stop in stops if stop is not None))


class TokenizerCodec:
    """`tokenizer` is one of transformers; with `chat` a reply is a message of the user's. `stops`: the tokens that end
    an answer, beside the tokenizer's EOS. `given`: arguments of the chat template. Raises ValueError for others."""

    def __init__(
        self, tokenizer: Tokenizer, chat: bool, stops: Sequence[int] = (), given: Mapping[str, object] | None = None
    ):
        self._tokenizer, self._chat, self._given = tokenizer, chat, dict(given or {})
        taken, written = inspect.signature(tokenizer.apply_chat_template).parameters, str(tokenizer.chat_template)
        for name in self._given if chat else ():
            if name in taken or not re.search(rf"\b{re.escape(name)}\b", written):
                raise ValueError(f"got {name!r}, expected a variable that the chat template reads")
        self._stops = {*stops, tokenizer.eos_token_id} - {None}

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(whole(text), add_special_tokens=False), np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """Of special tokens only stop and pad tokens are left out: marks of thinking and of tool calls may be some."""
        silent = {*self._stops, self._tokenizer.pad_token_id}
        return str(self._tokenizer.decode([token for token in np.asarray(tokens).tolist() if token not in silent]))

    def reply(self, text: str, *, closed: bool | int = True) -> np.ndarray:
        """Raises ValueError for a chat template that leaves earlier turns out."""
        return self.continuation([{"role": "user", "content": text}], closed=closed)

    def opening(self, messages: Messages, tools: Sequence[object] = ()) -> np.ndarray:
        """Raises ValueError for messages that the chat template does not take, or tools without a template."""
        if not self._chat:
            return np.array(self._tokenizer.encode(whole(_as_they_stand(messages, tools))), np.int32)
        messages, begun = parted(messages)
        return np.append(self._tokens(self._render(messages, tools, add_generation_prompt=True)), self.encode(begun))

    def continuation(
        self, messages: Messages, tools: Sequence[object] = (), *, closed: bool | int = True
    ) -> np.ndarray:
        """Raises ValueError as `reply` and `opening`."""
        if not self._chat:
            return self._tokens(self._as_text(_as_they_stand(messages, tools)))
        messages, begun = parted(messages)
        _, said, rest = self._render([*_TALK, *messages], tools, add_generation_prompt=True).partition(_SAID)
        if not said:
            raise ValueError("the chat template leaves out earlier turns: they can't be continued")
        shown = self._behind(rest, closed)
        return np.append(shown, self.encode(begun)) if begun else shown

    def _behind(self, rest: str, closed: bool | int) -> np.ndarray:
        bare, ends = self._tokens(rest.lstrip()), self._stops if closed is True else {closed, self.turn_end}
        return bare[1:] if closed is not False and set(bare[:1].tolist()) & ends else self._tokens(rest)

    @cached_property
    def turn_end(self) -> int | None:
        """The token that the chat template writes behind the last answer; None where that is no token of its own."""
        with suppress(ValueError):
            behind = self._render(_TALK).partition(_SAID)[2] if self._chat else ""
            first = self.encode(behind.strip())[:1].tolist()
            return first[0] if first and first[0] in self._tokenizer.added_tokens_decoder else None
        return None

    @cached_property
    def stray_marks(self) -> str:
        """Marks, but those of empty thinking, that the chat template writes before an answer, and not in its generation
        prompt: the model writes them itself, so its answer is no message yet, and no turn can follow."""
        if not self._chat:
            return ""
        begun = self._render([_ASKED], add_generation_prompt=True).rstrip()
        earlier = self._render([*_TALK, _ASKED]).partition(_SAID)[0]
        return re.sub(r"\s|</?think>", "", earlier.removeprefix(begun)) if earlier.startswith(begun) else ""

    def rewrites(self, said: str, messages: Messages, tools: Sequence[object] = ()) -> bool:
        """Templates of reasoning models drop the reasoning of earlier turns, some of them only when a user speaks."""
        if not self._chat:
            return False
        begun = self._render([_ASKED], tools, add_generation_prompt=True)
        talk = [_ASKED, {"role": "assistant", "content": said}, *messages]
        after = self._render(talk, tools, add_generation_prompt=True)
        after, before = ("".join(text.split()) for text in (after, begun + said))  # templates differ in white space
        return not after.startswith(before)

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        """Matches tokens that text of others must not become: special ones, and those of a plain conversation. Others,
        such as those around a tool's result, are the text that they stand for."""
        talk = ""
        with suppress(Exception):  # a template may refuse anything
            talk = self._tokenizer.apply_chat_template(_TALK, tokenize=False, **self._given, add_generation_prompt=True)
        added = self._tokenizer.added_tokens_decoder.values()
        found = {str(each) for each in added if each.special or str(each) in talk}
        return re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True))) or _SPLIT)

    def _as_text(self, text: str) -> str:
        return self._controls.sub(lambda it: it[0][0] + _SPLIT + it[0][1:], text)

    def _harmless(self, message: Mapping[str, object]) -> Mapping[str, object]:
        """Raises ValueError for a role that is no word."""
        if not ROLE.fullmatch(role := str(message["role"])):
            raise ValueError(f"role: got {role!r}, expected a word")
        if role == "assistant":
            return message
        return {
            key: self._as_text(value) if isinstance(value, str) and key != "role" else value
            for key, value in message.items()
        }

    def _tokens(self, rendered: str) -> np.ndarray:
        return np.concatenate([self.encode(text) for text in rendered.split(_SPLIT)])

    def _render(self, messages: Messages, tools: Sequence[object] = (), **more: object) -> str:
        from jinja2 import TemplateError

        given = self._given | ({"tools": list(tools)} if tools else {})
        talk = [self._harmless(message) for message in messages]
        try:
            return str(self._tokenizer.apply_chat_template(talk, tokenize=False, **given, **more))
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template does not take these messages: {error}") from None


def parted(messages: Sequence[Message]) -> tuple[list[Message], str]:
    """Messages before the beginning of an answer (a last message of the assistant's, without calls), and its text."""
    if not messages or messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]:
        return [*messages], ""
    return [*messages[:-1]], str(messages[-1]["content"])


def _as_they_stand(messages: Messages, tools: Sequence[object]) -> str:
    if tools:
        raise ValueError("tools need a chat template (task.chat_template)")
    return "".join(str(message["content"]) for message in messages)
