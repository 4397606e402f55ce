"""What tasks of text share: a tokenizer with its chat template, loaded on first need, and prompts made of messages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Annotated

from areal_like.tasks.chat import Tokenizer, TokenizerCodec, stop_tokens
from areal_like.types import Prompt

BYTES = "bytes"
"""As `tokenizer`: the one of `byte_tokenizer`."""
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FILES = ("*token*.json", "tokenizer*", "tekken*", "vocab*", "merges*", "chat_template*", "*.jinja", "*.model", "*.py")
"""Of a tokenizer, in the folder of its model."""
Turns = tuple[dict[str, str], ...]


def load_tokenizer(folder: str, knob: str) -> Tokenizer:
    """The tokenizer in a local folder. Raises ValueError (naming `knob`)."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a parser of damaged files may raise anything
        raise ValueError(f"{knob}: the tokenizer in {folder!r} can't be loaded: {error}") from error


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of single bytes: ids 0–255, <eos> 256, <pad> 257; `TEMPLATE` is its chat template. Its unknown token,
    which no text has, is named: classes that transformers chooses by the model would add one."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<pad>"}
    found = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    found.chat_template = TEMPLATE
    return found


class TextTask:
    """The base of tasks with a tokenizer.

    tokenizer: a local folder in Hugging Face's format; or `bytes`, a token per byte of UTF-8 with a minimal chat
        template, for models from random weights.
    chat_template: wrap the prompt in the tokenizer's template, or in that of a file (Jinja); with false it is encoded
        as it is. template: arguments of the template, as `{enable_thinking: false}`. system: the system message of
        every prompt that brings none of its own. Both need chat_template. suffix: text after each prompt, e.g. how to
        write the answer down.
    max_prompt_tokens: a longer prompt raises ValueError when it is asked for. max_tokens: longest response.

    Raises FileNotFoundError where the folder has no tokenizer, and ValueError.
    """

    def __init__(
        self,
        *,
        tokenizer: str,
        max_prompt_tokens: Annotated[int, "[1, inf)"] = 1024,
        max_tokens: Annotated[int, "[1, inf)"] = 1024,
        suffix: str = "",
        chat_template: bool | str = True,
        template: Mapping[str, object] | None = None,
        system: str | None = None,
    ):
        if tokenizer != BYTES and not (Path(tokenizer) / "tokenizer_config.json").is_file():
            raise FileNotFoundError(f"task.tokenizer: got {tokenizer!r}, expected a folder with tokenizer_config.json")
        for key, given in (("system", system), ("template", template)):
            if given is not None and not chat_template:
                raise ValueError(f"task.{key}: only a chat template (task.chat_template) has a place for it")
        if isinstance(chat_template, str) and not Path(chat_template).is_file():
            raise FileNotFoundError(f"task.chat_template: got {chat_template!r}, expected true, false or a file")
        self._folder = tokenizer
        self._max_prompt_tokens, self._max_tokens = max_prompt_tokens, max_tokens
        self._suffix, self._chat, self._system = suffix, bool(chat_template), system
        self._template = Path(chat_template).read_text("utf-8") if isinstance(chat_template, str) else None
        self._given, self._codecs = dict(template or {}), dict[str, TokenizerCodec]()

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token → id."""
        return dict(self._tokenizer.get_vocab())

    @property
    def pad_token(self) -> int:
        pad = self._tokenizer.pad_token_id
        return self.stop_tokens[0] if pad is None else pad

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """As `areal_like.tasks.chat.stop_tokens`. Raises ValueError where there is none."""
        found = stop_tokens(Path(self._folder), self._tokenizer)
        if not found:
            hint = "set eos_token in its tokenizer_config.json, or eos_token_id in its generation_config.json"
            raise ValueError(f"task.tokenizer: {self._folder!r} names no end-of-sequence token; {hint}")
        return found

    def save_tokenizer(self, folder: str) -> None:
        """Write the tokenizer next to a trained model, so that the folder can be loaded as a whole, by other versions
        of transformers too: the source's files as they are, and the class's name that all versions have."""
        if self._folder == BYTES:
            self._tokenizer.save_pretrained(folder)
        for source in () if self._folder == BYTES else Path(self._folder).iterdir():
            if source.is_file() and any(fnmatch(source.name, each) for each in FILES):
                shutil.copyfile(source, Path(folder) / source.name)
        file = Path(folder) / "tokenizer_config.json"
        config = json.loads(file.read_bytes())
        if config.get("tokenizer_class") == "TokenizersBackend":  # of transformers 5, which has the older names as well
            special = {"additional_special_tokens": config.pop("extra_special_tokens", [])}
            config |= special | {"tokenizer_class": "PreTrainedTokenizerFast"}
            file.write_text(json.dumps(config, indent=2), encoding="utf-8")
        if self._template is not None:
            (Path(folder) / "chat_template.jinja").write_text(self._template, encoding="utf-8")

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        found = byte_tokenizer() if self._folder == BYTES else load_tokenizer(self._folder, "task.tokenizer")
        if self._template is not None:
            found.chat_template = self._template
        if self._chat and not found.chat_template:
            hint = "set task.chat_template=false, or take the tokenizer of a chat model"
            raise ValueError(f"task.tokenizer: the tokenizer in {self._folder!r} has no chat template: {hint}")
        return found

    @cached_property
    def _codec(self) -> TokenizerCodec:
        return self._codec_with({}, "task.template")

    def _codec_with(self, given: Mapping[str, object], place: str) -> TokenizerCodec:
        """The codec with more arguments of the chat template, which stand at `place`. Raises ValueError."""
        key = json.dumps(given, sort_keys=True)
        try:
            if key not in self._codecs:
                codec = TokenizerCodec(self._tokenizer, self._chat, self.stop_tokens, self._given | {**given})
                self._codecs[key] = codec
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        return self._codecs[key]

    def _messages(self, prompt: str | list[dict[str, str]]) -> Turns:
        """Of a prompt, with the task's suffix and system message."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        asked = -2 if messages[-1]["role"] == "assistant" else -1  # the last one begins the answer
        messages[asked]["content"] += self._suffix
        if self._system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system})
        return tuple(messages)

    def _prompt(
        self,
        place: str,
        messages: Turns,
        answer: object,
        template: Mapping[str, object] | None = None,
        tools: Sequence[object] = (),
    ) -> Prompt:
        """The prompt at `place` (a row, in words). Raises ValueError where it is too long."""
        codec = self._codec_with(template, f"{place}: 'template'") if template else self._codec
        tokens = codec.opening(messages, tools)
        if not 1 <= len(tokens) <= self._max_prompt_tokens:
            allowed = f"task.max_prompt_tokens allows 1 to {self._max_prompt_tokens}"
            raise ValueError(f"{place}: the prompt has {len(tokens)} tokens; {allowed}: raise it, or take the row out")
        return Prompt(tokens, answer, self._max_tokens, (), codec, messages)
