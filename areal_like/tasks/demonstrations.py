"""Demonstrations: conversations to imitate, from a file or a data set (`loss=sft`).

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}
    {"prompt": "..." or messages, "completion": "..." or messages}

The assistant's text and the end of each of its turns are trained; all else is only read. The tokens are those of a
rollout, so reinforcement learning can go on where imitation ends.
"""

import json
from collections.abc import Mapping
from itertools import pairwise, takewhile
from typing import Any

import numpy as np

from areal_like.interfaces import Demonstration
from areal_like.tasks.rows import FileTask, Row, are_messages, checked_prompt, column_names
from areal_like.types import Prompt

ASSISTANT = "assistant"


class Demonstrations(FileTask):
    """Conversations to imitate. Knobs of the file: see `areal_like.tasks.rows.FileTask`; openings take the place of
    prompts: `suffix` and `system` change them, `max_prompt_tokens` bounds them, `max_tokens` the rest.

    columns: {messages: ..., prompt: ..., completion: ...}, names in the data where they differ; prompt and completion
        are read where a row has no messages. An assistant's message with `"weight": 0` is read and not trained.

    As a task of its own (`scripts.eval`) it asks for the last turn; the reward is 1 for the same text, else 0.
    """

    def __init__(self, seed: int, *, columns: Mapping[str, str] | None = None, **file: Any):
        self._names = column_names(columns, "messages", "prompt", "completion")
        super().__init__(seed, **file)

    def prompt(self, split: str, row: int) -> Prompt:
        """The conversation up to its last turn, which is the answer."""
        source, name = self._rows.row(split, row)
        turns = json.loads(source.answer)
        messages = [*self._messages(source.prompt), *turns[:-1]]
        return self._prompt(name, tuple(messages), turns[-1]["content"])

    def demonstration(self, split: str, row: int) -> Demonstration:
        """Raises ValueError for one that is too long, or a chat template that leaves out earlier turns."""
        source, name = self._rows.row(split, row)
        turns: list[dict[str, str]] = json.loads(source.answer)
        prompt = self._prompt(name, self._messages(source.prompt), None)
        if marks := self._codec.stray_marks:
            raise ValueError(f"task.tokenizer: its chat template writes {marks!r} before an answer: take another one")
        parts: list[np.ndarray] = []
        trained: list[bool] = []
        for number, turn in enumerate(turns):
            if turn["role"] != ASSISTANT:
                continue
            behind = list(takewhile(lambda each: each["role"] != ASSISTANT, turns[number + 1 :]))
            end, shown = self._codec.turn_end, np.zeros(0, np.int32)
            end = self.stop_tokens[0] if end is None else end
            if behind:
                whole, shown = (self._codec.continuation(behind, closed=closed) for closed in (False, True))
                end = int(whole[-1 - len(shown)]) if len(shown) < len(whole) else end
            said = np.append(self._codec.encode(turn["content"]), end).astype(np.int32)
            parts += [said, shown]
            trained += [not _is_only_read(turn)] * len(said) + [False] * len(shown)
        tokens = np.concatenate(parts)
        if len(tokens) > self._max_tokens:
            allowed = f"task.max_tokens allows {self._max_tokens}: raise it, or take the row out"
            raise ValueError(f"{name}: {len(tokens)} tokens follow the opening; {allowed}")
        return Demonstration(prompt, tokens, np.array(trained, bool))

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        return float(prompt.codec.decode(tokens).strip() == str(prompt.answer).strip())

    def _row(self, place: str, fields: Mapping[str, object]) -> Row:
        """The opening of a conversation and, as JSON, the messages from the assistant's first turn on."""
        opening, rest = self._parted(place, fields)
        turns = [turn for turn in rest if turn["role"] == ASSISTANT]
        if all(_is_only_read(turn) for turn in turns):
            raise ValueError(f"{place}: every message of the assistant has the weight 0")
        if any(here["role"] == after["role"] == ASSISTANT for here, after in pairwise(rest)):
            raise ValueError(f"{place}: two messages of the assistant follow one another: join them")
        return Row(place, opening, json.dumps(rest))

    def _parted(
        self, place: str, fields: Mapping[str, object]
    ) -> tuple[str | list[dict[str, str]], list[dict[str, str]]]:
        whole, begun, completed = self._names.values()
        if whole in fields:
            said = fields[whole]
            if not self._chat or not are_messages(said):
                raise ValueError(f"{place}: {whole!r} must be a list of messages, and needs task.chat_template")
            first = next((at for at, message in enumerate(said) if message["role"] == ASSISTANT), 0)
            if first == 0 or said[-1]["role"] != ASSISTANT:
                raise ValueError(f"{place}: the first message must not be the assistant's, and the last one must")
            return said[:first], said[first:]
        for key in (begun, completed):
            if key not in fields:
                raise ValueError(f"{place}: no {whole!r} and no {key!r}; the keys are {', '.join(fields)}")
        prompt = checked_prompt(place, begun, fields[begun], self._chat)
        completion = fields[completed]
        if isinstance(completion, str):
            return prompt, [{"role": ASSISTANT, "content": completion}]
        if self._chat and are_messages(completion) and completion[0]["role"] == completion[-1]["role"] == ASSISTANT:
            return prompt, completion
        wanted = "a text, or with a chat template messages that begin and end with the assistant's"
        raise ValueError(f"{place}: {completed!r} must be {wanted}")


def _is_only_read(turn: Mapping[str, object]) -> bool:
    return turn.get("weight") == 0
