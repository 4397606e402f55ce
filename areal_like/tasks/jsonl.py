"""Jsonl: prompts and answers from a file with one JSON object per line, for any local tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Annotated

import numpy as np

from areal_like.config.registry import as_spec, target
from areal_like.tasks.rows import Row, TaskOfRows, checked_prompt, rows_of_files
from areal_like.tasks.text import TextTask
from areal_like.types import Prompt


class Jsonl(TaskOfRows, TextTask):
    """Rows of a file, in an order shuffled by the seed. Knobs of the text: see `areal_like.tasks.text`.

    path: the file.
    prompt_key, answer_key: names within a line's object. A prompt is a text, or with `chat_template` also a list of
        messages `{role, content}`; an answer is a text, a number, or an object, which verifiers get as JSON text.
    heldout_path: file of the held-out rows; a training row whose prompt is among them is left out (and logged).
        Without it, `heldout_fraction` of the different prompts of `path`, at least one, is held out.
    reward: "math_verify", "exact", "last_number", "unit_tests" (of a program; `areal_like.tasks.unit_tests`), or
        "module:name" of a function `(answer: str, response: str, *, knobs) -> float`; {name: ..., knobs} sets knobs.

    Raises FileNotFoundError (file, tokenizer folder) and ValueError (a bad line, with file and line; an empty split).
    """

    def __init__(
        self,
        seed: int,
        *,
        path: str,
        prompt_key: str = "prompt",
        answer_key: str = "answer",
        heldout_path: str | None = None,
        heldout_fraction: Annotated[float, "(0, 1)"] = 0.05,
        reward: str | Mapping[str, object] = "math_verify",
        **text: object,
    ):
        super().__init__(**text)  # type: ignore[arg-type]  # its knobs, checked by the registry
        self._knobs = as_spec(reward)
        self._verifier = target("reward", str(self._knobs.pop("name")))

        row_of = partial(_row, prompt_key=prompt_key, answer_key=answer_key, chat=self._chat)
        self._rows = rows_of_files(seed, path, heldout_path, heldout_fraction, row_of)

    def prompt(self, split: str, row: int) -> Prompt:
        source, name = self._rows.row(split, row)
        return self._prompt(name, self._messages(source.prompt), source.answer)

    def rows_beyond(self, split: str, tokens: int) -> list[int]:
        """The rows whose prompts may be longer than `tokens`, or than `max_prompt_tokens`. It only counts bytes (a
        token has at least one), so that few rows of a long file must be encoded."""
        role = len(self._codec.opening(({"role": "user", "content": ""},)))
        beside = len((self._suffix + (self._system or "")).encode()) + role  # a system message of its own
        room = min(tokens, self._max_prompt_tokens) - beside
        return [number for number, row in enumerate(self._rows.of(split)) if row.most_tokens(role) > room]

    def verification(self, prompt: Prompt, tokens: np.ndarray) -> tuple[str, tuple[str, str], dict[str, object]]:
        """The verifier of a response as "module:name", its arguments (answer, response text) and its knobs."""
        return self._verifier, (prompt.answer, self._text(tokens)), self._knobs

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        """The verifier's score, computed in this process and without a time limit."""
        verifier, arguments, knobs = self.verification(prompt, tokens)
        return float(resolve_name(verifier)(*arguments, **knobs))


def _row(place: str, fields: dict[str, object], prompt_key: str, answer_key: str, chat: bool) -> Row:
    for key in (prompt_key, answer_key):
        if key not in fields:
            raise ValueError(f"{place}: no {key!r}; the keys are {', '.join(fields)}")
    prompt, answer = checked_prompt(place, prompt_key, fields[prompt_key], chat), fields[answer_key]
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float, dict)):
        raise ValueError(f"{place}: {answer_key!r} must be a text, a number or an object")
    return Row(place, prompt, json.dumps(answer) if isinstance(answer, dict) else str(answer))
