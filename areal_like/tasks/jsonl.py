"""Jsonl: prompts and answers from a file with one JSON object per line, for any local tokenizer."""

import json
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

import numpy as np

from areal_like.config.registry import as_spec, target
from areal_like.tasks.rows import FileTask, Row, checked_prompt
from areal_like.types import Prompt


class Jsonl(FileTask):
    """Prompts and answers. Knobs of the file: see `areal_like.tasks.rows.FileTask`.

    prompt_key, answer_key: names within a line's object. A prompt is a text, or with `chat_template` also a list of
        messages `{role, content}`; an answer is a text, a number, or an object, which verifiers get as JSON text.
    reward: "math_verify", "exact", "last_number", "unit_tests" (of a program; `areal_like.tasks.unit_tests`), or
        "module:name" of a function `(answer: str, response: str, *, knobs) -> float`; {name: ..., knobs} sets knobs.
    """

    def __init__(
        self,
        seed: int,
        *,
        prompt_key: str = "prompt",
        answer_key: str = "answer",
        reward: str | Mapping[str, object] = "math_verify",
        **file: Any,
    ):
        self._prompt_key, self._answer_key = prompt_key, answer_key
        self._knobs = as_spec(reward)
        self._verifier = target("reward", str(self._knobs.pop("name")))
        super().__init__(seed, **file)

    def prompt(self, split: str, row: int) -> Prompt:
        source, name = self._rows.row(split, row)
        return self._prompt(name, self._messages(source.prompt), source.answer)

    def rows_beyond(self, split: str, tokens: int) -> list[int]:
        """The rows whose prompts may be longer than `tokens`, or than `max_prompt_tokens`. It only counts bytes (a
        token has at least one), so that few rows of a long file must be encoded."""
        role = len(self._codec.opening(({"role": "user", "content": ""},)))
        beside = len((self._suffix + (self._system or "")).encode()) + role  # a system message of its own
        room = min(tokens, self._max_prompt_tokens) - beside
        return [number for number, row in enumerate(self._rows.splits[split]) if row.most_tokens(role) > room]

    def verification(self, prompt: Prompt, tokens: np.ndarray) -> tuple[str, tuple[str, str], dict[str, object]]:
        """The verifier of a response as "module:name", its arguments (answer, response text) and its knobs."""
        return self._verifier, (prompt.answer, self._text(tokens)), self._knobs

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        """The verifier's score, computed in this process and without a time limit."""
        verifier, arguments, knobs = self.verification(prompt, tokens)
        return float(resolve_name(verifier)(*arguments, **knobs))

    def _row(self, place: str, fields: Mapping[str, object]) -> Row:
        for key in (self._prompt_key, self._answer_key):
            if key not in fields:
                raise ValueError(f"{place}: no {key!r}; the keys are {', '.join(fields)}")
        prompt = checked_prompt(place, self._prompt_key, fields[self._prompt_key], self._chat)
        answer = fields[self._answer_key]
        if isinstance(answer, bool) or not isinstance(answer, (str, int, float, dict)):
            raise ValueError(f"{place}: {self._answer_key!r} must be a text, a number or an object")
        return Row(place, prompt, json.dumps(answer) if isinstance(answer, dict) else str(answer))
