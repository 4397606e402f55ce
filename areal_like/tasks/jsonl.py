"""Jsonl: prompts and answers from a file or a data set, for any local tokenizer."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from pkgutil import resolve_name
from typing import Annotated, Any

import numpy as np

from areal_like.config.registry import COMPONENTS, as_spec, target
from areal_like.config.signatures import REQUIRED, Signature, reads_first, signature
from areal_like.tasks.chat import parted
from areal_like.tasks.maths import expression, number
from areal_like.tasks.rows import JSON_COLUMNS, FileTask, Row, as_json, checked_prompt, column_names
from areal_like.tasks.unit_tests import checked
from areal_like.types import Prompt

CHECKS: dict[str, Callable[[str], object]] = {"math_verify": expression, "last_number": number, "unit_tests": checked}
"""Shipped reward → a check of an answer, which raises ValueError where no response could be right."""
TAIL = 16
"""Tokens of a prompt's end that hold `<think>`, if the chat template ends with it."""
THOUGHT = "</think>"
"""It ends the thoughts of a model."""


class Jsonl(FileTask):
    """Prompts and answers.

    columns: {prompt: ..., answer: ..., tools: ..., template: ...}, names in the data where they differ. A prompt is a
        text, or with `chat_template` also a list of messages `{role, content}`; a last one of the assistant's begins
        the response. An answer is a text, a number, or an object, which verifiers get as JSON text. It may be left out
        where the reward is your own and does not read it. Tools, a list (or its JSON) that the chat template shows, and
        "template", arguments of it beside the task's, may always be left out.
    reward: "math_verify", "exact", "last_number", "unit_tests" (of a program; `areal_like.tasks.unit_tests`), or
        "module:name" of a function `(answer: str, response: str, *, knobs)` that returns a number, {name: number} of
        a reward's parts, or None: the sample is left out of its group. {name: ..., knobs} sets knobs. Those that are
        not set are the row's other columns of that name; a function with `**` gets all of them.
    reward_weights: {name: weight} of a reward's parts, each 1 if not given: their weighted sum is trained.
    answer_after: the reward gets the text behind the last of these, and none where there is none: so thoughts are not
        graded. By default `</think>` where the chat template mentions it, and then all of an answer without thoughts;
        "": the reward gets everything.
    """

    def __init__(
        self,
        seed: int,
        *,
        columns: Mapping[str, str] | None = None,
        reward: str | Mapping[str, object] = "math_verify",
        reward_weights: dict[str, Annotated[float, "(-inf, inf)"]] | None = None,
        answer_after: str | None = None,
        **file: Any,
    ):
        self._names = column_names(columns, "prompt", "answer", *JSON_COLUMNS)
        self._knobs = as_spec(reward)
        name = str(self._knobs.pop("name"))
        self._verifier, self._check = target("reward", name), CHECKS.get(name, str)
        self._is_shipped = name in COMPONENTS["reward"]
        self.reward_weights, self._answer_after = reward_weights or {}, answer_after
        if self._is_shipped and reward_weights:
            raise ValueError(f"task.reward_weights: reward={name} has no parts; expected a reward of your own")
        self._takes = Signature({}, False) if self._is_shipped else signature(self._verifier)
        answer = [self._names["answer"]] * (self._is_shipped or reads_first(self._verifier))
        others = [knob for knob, known in self._takes.knobs.items() if known.default is REQUIRED]
        self._needed = [self._names["prompt"], *answer, *(knob for knob in others if knob not in self._knobs)]
        super().__init__(seed, **file)

    def prompt(self, split: str, row: int) -> Prompt:
        source, name = self._rows.row(split, row)
        messages = self._messages(source.prompt)
        prompt = self._prompt(name, messages, source.answer, source.template, source.tools)
        return replace(prompt, columns=source.columns)

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
        text, tail = begun + prompt.codec.decode(tokens), TAIL + len(self._codec.encode(begun))
        opened = self._codec.decode(prompt.tokens[-tail:]).removesuffix(begun).rstrip().endswith("<think>")
        usual = THOUGHT if opened or (self._chat and THOUGHT in str(self._tokenizer.chat_template)) else ""
        after = usual if self._answer_after is None else self._answer_after
        if after in text:
            text = text.rpartition(after)[2] if after else text
        elif after != usual or opened or "<think>" in text:
            text = ""
        return self._verifier, (prompt.answer, text), {**prompt.columns, **self._knobs}

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float | Mapping[str, float] | None:
        """The verifier's score, computed in this process and without a time limit."""
        verifier, arguments, knobs = self.verification(prompt, tokens)
        score: float | Mapping[str, float] | None = resolve_name(verifier)(*arguments, **knobs)
        return score

    def _row(self, place: str, fields: Mapping[str, object]) -> Row:
        key, answered = self._names["prompt"], self._names["answer"]
        if missing := [name for name in self._needed if name not in fields]:
            raise ValueError(f"{place}: no {missing[0]!r}; the keys are {', '.join(fields)}: see task.columns")
        prompt = checked_prompt(place, key, fields[key], self._chat)
        try:
            answer = in_words(fields.get(answered, ""))
            self._check(answer)
        except ValueError as error:
            raise ValueError(f"{place}: {answered!r}: {error}") from None
        tools, template = (as_json(place, self._names[name], fields, kind) for name, kind in JSON_COLUMNS.items())
        return Row(place, prompt, answer, template, tools, self._taken(fields))

    def _taken(self, fields: Mapping[str, object]) -> dict[str, object]:
        """Columns that are arguments of the reward, as JSON has them."""
        names = fields.keys() if self._takes.takes_any else fields.keys() & self._takes.knobs.keys()
        own = names - {*self._names.values(), *self._knobs}
        return {name: json.loads(json.dumps(fields[name], default=str)) for name in sorted(own)}


def in_words(answer: object) -> str:
    """As a model would write it: a number in digits, an object as JSON. Raises ValueError for any other value."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | dict):
        raise ValueError(f"got {answer!r}, expected a text, a number or an object")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError(f"got {answer!r}, expected a finite number")
    if isinstance(answer, float):
        return f"{Decimal(str(answer or 0)).normalize():f}"
    return json.dumps(answer) if isinstance(answer, dict) else str(answer)
