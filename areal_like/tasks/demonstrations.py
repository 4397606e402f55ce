"""Demonstrations: conversations to imitate, from a file with one JSON object per line (`loss=sft`).

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}
    {"prompt": "..." or messages, "completion": "..." or messages}

The assistant's text and the end of each of its turns are trained; all else is only read. The tokens are those of a
rollout: the prompt as `jsonl` encodes it, each turn's text and the stop token behind it, and the tokens that a
multi-turn workflow shows between turns. So reinforcement learning can go on where imitation ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated

import numpy as np

from areal_like.tasks.rows import Row, are_messages, rows_of_files
from areal_like.tasks.text import TextTask
from areal_like.types import Demonstration, Prompt

ASSISTANT = "assistant"


class Demonstrations(TextTask):
    """Rows of a file, in an order shuffled by the seed. Knobs of the text: see `areal_like.tasks.text`; `suffix` and
    `system` change the opening of a conversation, `max_prompt_tokens` bounds it, `max_tokens` the rest.

    path: the file. prompt_key, completion_key: names within a line that has no "messages". An assistant's message with
        `"weight": 0` is read and not trained.
    heldout_path: file of the held-out rows; a training row with the opening of one of them is left out (and logged).
        Without it, `heldout_fraction` of the different openings of `path`, at least one, is held out.

    As a task of its own (`scripts.eval`) it asks for the last turn; the reward is 1 for the same text, else 0.
    Raises FileNotFoundError (file, tokenizer folder) and ValueError (a bad line, with file and line; an empty split).
    """

    def __init__(
        self,
        seed: int,
        *,
        path: str,
        prompt_key: str = "prompt",
        completion_key: str = "completion",
        heldout_path: str | None = None,
        heldout_fraction: Annotated[float, "(0, 1)"] = 0.05,
        **text: object,
    ):
        super().__init__(**text)  # type: ignore[arg-type]  # its knobs, checked by the registry

        def row_of(place: str, fields: dict[str, object]) -> Row:
            opening, rest = _parted(place, fields, prompt_key, completion_key, self._chat)
            return Row(place, opening, json.dumps(rest))

        self._rows = rows_of_files(seed, path, heldout_path, heldout_fraction, row_of)

    def size(self, split: str) -> int:
        return len(self._rows.of(split))

    def prompt(self, split: str, row: int) -> Prompt:
        """The conversation up to its last turn, which is the answer."""
        source, name = self._rows.row(split, row)
        turns = json.loads(source.answer)
        messages = [*self._messages(source.prompt), *turns[:-1]]
        return self._prompt(name, tuple(messages), turns[-1]["content"])

    def demonstration(self, split: str, row: int) -> Demonstration:
        """Raises ValueError for one that is too long, or a chat template that writes earlier turns differently when
        others follow."""
        source, name = self._rows.row(split, row)
        turns: list[dict[str, str]] = json.loads(source.answer)
        prompt = self._prompt(name, self._messages(source.prompt), None)
        parts: list[np.ndarray] = []
        trained: list[bool] = []
        for number, turn in enumerate(turns):
            if turn["role"] == ASSISTANT:
                said = np.append(self._codec.encode(turn["content"]), self.stop_tokens[:1]).astype(np.int32)
                parts.append(said)
                trained += [not _is_only_read(turn)] * len(said)
            elif turns[number - 1]["role"] == ASSISTANT:  # all messages between two turns at once
                behind = [each["role"] for each in turns[number:]].index(ASSISTANT)
                parts.append(self._codec.continuation(turns[number : number + behind]))
                trained += [False] * len(parts[-1])
        tokens = np.concatenate(parts)
        if len(tokens) > self._max_tokens:
            raise ValueError(
                f"{name}: {len(tokens)} tokens follow the opening; task.max_tokens allows "
                f"{self._max_tokens}: raise it, or take the row out"
            )
        return Demonstration(prompt, tokens, np.array(trained, bool))

    def place(self, split: str, row: int) -> str:
        """The place of a row, as "path:line"."""
        return self._rows.of(split)[row].place

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        return float(self._text(tokens).strip() == str(prompt.answer).strip())


def _parted(
    place: str, fields: Mapping[str, object], prompt_key: str, completion_key: str, chat: bool
) -> tuple[str | list[dict[str, str]], list[dict[str, str]]]:
    """The opening of a conversation, and the messages from the assistant's first turn on. Raises ValueError."""
    if "messages" in fields:
        said = fields["messages"]
        if not chat or not are_messages(said):
            wanted = (
                "a list of messages {role, content}, each a text" if chat else "left out without task.chat_template"
            )
            raise ValueError(f'{place}: "messages" must be {wanted}')
        first = next((at for at, message in enumerate(said) if message["role"] == ASSISTANT), 0)
        if first == 0 or said[-1]["role"] != ASSISTANT:
            raise ValueError(f"{place}: the first message must not be the assistant's, and the last one must")
        return said[:first], _trainable(place, said[first:])
    for key in (prompt_key, completion_key):
        if key not in fields:
            raise ValueError(f'{place}: no "messages" and no {key!r}; the keys are {", ".join(fields)}')
    prompt, completion = fields[prompt_key], fields[completion_key]
    if not isinstance(prompt, str) and not (chat and are_messages(prompt)):
        wanted = "a text or a list of messages {role, content}" if chat else "a text"
        raise ValueError(f"{place}: {prompt_key!r} must be {wanted}")
    if isinstance(completion, str):
        return prompt, [{"role": ASSISTANT, "content": completion}]
    if not chat or not are_messages(completion):
        raise ValueError(f"{place}: {completion_key!r} must be a text, or with a chat template a list of messages")
    if completion[0]["role"] != ASSISTANT or completion[-1]["role"] != ASSISTANT:
        raise ValueError(f"{place}: {completion_key!r} must begin and end with the assistant's messages")
    return prompt, _trainable(place, completion)


def _is_only_read(turn: Mapping[str, object]) -> bool:
    return turn.get("weight") == 0


def _trainable(place: str, turns: list[dict[str, str]]) -> list[dict[str, str]]:
    """Raises ValueError where no token would be trained, or two turns of the assistant follow one another."""
    roles = [turn["role"] for turn in turns]
    if all(_is_only_read(turn) for turn in turns if turn["role"] == ASSISTANT):
        raise ValueError(f"{place}: every message of the assistant has the weight 0")
    if any(here == after == ASSISTANT for here, after in pairwise(roles)):
        raise ValueError(f"{place}: two messages of the assistant follow one another: join them")
    return turns
