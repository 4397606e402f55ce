"""Jsonl: prompts and answers from a file with one JSON object per line, for any local tokenizer."""

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from pkgutil import resolve_name
from typing import Annotated, Any

import numpy as np

from areal_like.config.registry import COMPONENTS, as_spec, target
from areal_like.config.signatures import reads_first
from areal_like.tasks.chat import parted
from areal_like.tasks.maths import expression, number
from areal_like.tasks.rows import FileTask, Row, checked_prompt
from areal_like.tasks.unit_tests import checked
from areal_like.types import Prompt

CHECKS: dict[str, Callable[[str], object]] = {"math_verify": expression, "last_number": number, "unit_tests": checked}
"""Shipped reward → a check of an answer, which raises ValueError where no response could be right."""
TAIL = 16
"""Tokens of a prompt's end that hold `<think>`, if the chat template ends with it."""
THOUGHT = "</think>"
"""It ends the thoughts of a model."""


class Jsonl(FileTask):
    """Prompts and answers. Knobs of the file: see `areal_like.tasks.rows.FileTask`.

    prompt_key, answer_key: names within a line's object. A prompt is a text, or with `chat_template` also a list of
        messages `{role, content}`; a last one of the assistant's begins the response. An answer is a text, a number, or
        an object, which verifiers get as JSON text. It may be left out where the reward is your own and does not read
        it. A row's "template" has arguments of the chat template beside the task's.
    reward: "math_verify", "exact", "last_number", "unit_tests" (of a program; `areal_like.tasks.unit_tests`), or
        "module:name" of a function `(answer: str, response: str, *, knobs)` that returns a number, {name: number} of
        a reward's parts, or None: the sample is left out of its group. {name: ..., knobs} sets knobs.
    reward_weights: {name: weight} of a reward's parts, each 1 if not given: their weighted sum is trained.
    answer_after: the reward gets the text behind the last of these, and none where there is none: so thoughts are not
        graded. By default "</think>" where the chat template mentions it, and then all of an answer without thoughts;
        "": the reward gets everything.
    """

    def __init__(
        self,
        seed: int,
        *,
        prompt_key: str = "prompt",
        answer_key: str = "answer",
        reward: str | Mapping[str, object] = "math_verify",
        reward_weights: dict[str, Annotated[float, "(-inf, inf)"]] | None = None,
        answer_after: str | None = None,
        **file: Any,
    ):
        self._prompt_key, self._answer_key = prompt_key, answer_key
        self._knobs = as_spec(reward)
        name = str(self._knobs.pop("name"))
        self._verifier, self._check = target("reward", name), CHECKS.get(name, str)
        self._is_shipped = name in COMPONENTS["reward"]
        self._reads_answer = self._is_shipped or reads_first(self._verifier)
        self.reward_weights, self._answer_after = reward_weights or {}, answer_after
        if self._is_shipped and reward_weights:
            raise ValueError(f"task.reward_weights: reward={name} has no parts; expected a reward of your own")
        super().__init__(seed, **file)

    def prompt(self, split: str, row: int) -> Prompt:
        source, name = self._rows.row(split, row)
        return self._prompt(name, self._messages(source.prompt), source.answer, source.template)

    def rows_beyond(self, split: str, tokens: int) -> list[int]:
        """The rows whose prompts may be longer than `tokens`, or than `max_prompt_tokens`. It only counts bytes (a
        token has at least one), so that few rows of a long file must be encoded."""
        role = len(self._codec.opening(({"role": "user", "content": ""},)))
        beside = len((self._suffix + (self._system or "")).encode()) + role  # a system message of its own
        room = min(tokens, self._max_prompt_tokens) - beside
        return [number for number, row in enumerate(self._rows.splits[split]) if row.most_tokens(role) > room]

    def verification(self, prompt: Prompt, tokens: np.ndarray) -> tuple[str, tuple[str, str], dict[str, object]]:
        """The verifier of a response as "module:name", its arguments (answer, response text) and its knobs."""
        begun = parted(prompt.messages)[1]
        text, tail = begun + self._text(tokens), TAIL + len(self._codec.encode(begun))
        opened = self._text(prompt.tokens[-tail:]).removesuffix(begun).rstrip().endswith("<think>")
        usual = THOUGHT if opened or (self._chat and THOUGHT in str(self._tokenizer.chat_template)) else ""
        after = usual if self._answer_after is None else self._answer_after
        if after in text:
            text = text.rpartition(after)[2] if after else text
        elif after != usual or opened or "<think>" in text:
            text = ""
        return self._verifier, (prompt.answer, text), self._knobs

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float | Mapping[str, float] | None:
        """The verifier's score, computed in this process and without a time limit."""
        verifier, arguments, knobs = self.verification(prompt, tokens)
        score: float | Mapping[str, float] | None = resolve_name(verifier)(*arguments, **knobs)
        return score

    def _row(self, place: str, fields: Mapping[str, object]) -> Row:
        for key in (self._prompt_key, self._answer_key):
            if key not in fields and (key == self._prompt_key or self._reads_answer):
                raise ValueError(f"{place}: no {key!r}; the keys are {', '.join(fields)}")
        prompt = checked_prompt(place, self._prompt_key, fields[self._prompt_key], self._chat, begins=True)
        try:
            answer = in_words(fields.get(self._answer_key, ""))
            self._check(answer)
        except ValueError as error:
            raise ValueError(f"{place}: {self._answer_key!r}: {error}") from None
        template = fields.get("template") or {}
        if not isinstance(template, dict):
            raise ValueError(f"{place}: 'template': got {template!r}, expected an object")
        return Row(place, prompt, answer, template)


def in_words(answer: object) -> str:
    """As a model would write it: a number in digits, an object as JSON. Raises ValueError for any other value."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | dict):
        raise ValueError(f"got {answer!r}, expected a text, a number or an object")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError(f"got {answer!r}, expected a finite number")
    if isinstance(answer, float):
        return f"{Decimal(str(answer or 0)).normalize():f}"
    return json.dumps(answer) if isinstance(answer, dict) else str(answer)
