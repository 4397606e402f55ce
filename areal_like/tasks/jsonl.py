"""Jsonl: prompts and answers from a file with one JSON object per line, for any local tokenizer.

The file is read when the task is built, the tokenizer on first need (`areal_like.tasks.text`). Scoring goes through
`verification`, which names the verifier instead of calling it: actors run it in another process, under a time limit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, TypeGuard

import numpy as np
import xxhash

from areal_like.registry import as_spec, target
from areal_like.sampling import stream_key
from areal_like.tasks.length_trace import trace_of
from areal_like.tasks.text import TextTask
from areal_like.types import Prompt

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a file: `place` is "path:line", `prompt` a text or a list of chat messages."""

    place: str
    prompt: str | list[dict[str, str]]
    answer: str

    @property
    def messages(self) -> int:
        return 1 if isinstance(self.prompt, str) else len(self.prompt)

    @property
    def bytes(self) -> int:
        """Bytes of its texts, in UTF-8."""
        texts = [self.prompt] if isinstance(self.prompt, str) else [text for m in self.prompt for text in m.values()]
        return sum(len(str(text).encode(errors="replace")) for text in texts)

    def hash(self, seed: int) -> int:
        """A 64-bit hash of the prompt's content: equal for equal prompts. It decides which prompts are held out."""
        return xxhash.xxh3_64_intdigest(json.dumps(self.prompt, sort_keys=True).encode(), seed=stream_key(seed))


class Jsonl(TextTask):
    """Rows of a file, in an order shuffled by the seed. Knobs of the text: see `areal_like.tasks.text`.

    path: the file.
    prompt_key, answer_key: names within a line's object. A prompt is a text, or with `chat_template` also a list of
        messages `{role, content}`; an answer is a text, a number, or an object, which verifiers get as JSON text.
    heldout_path: file of the held-out rows; a training row whose prompt is among them is left out (and logged).
        Without it, `heldout_fraction` of the different prompts of `path`, at least one, is held out.
    reward: a component: "math_verify", "exact", "last_number" (of the response is the answer), "unit_tests" (of a
        program; `areal_like.tasks.unit_tests`), or "module:name" of a function
        `(answer: str, response: str, *, knobs) -> float`; {name: ..., knobs} sets its knobs.
    length_trace: see `areal_like.tasks.length_trace`.

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
        length_trace: Mapping[str, float] | None = None,
        **text: object,
    ):
        super().__init__(**text)  # type: ignore[arg-type]  # its knobs, checked by the registry
        self._seed = seed
        self._knobs = as_spec(reward)
        self._verifier = target("reward", str(self._knobs.pop("name")))
        self._trace = trace_of(length_trace)

        def row_of(place: str, fields: dict[str, object]) -> Row:
            return _row(place, fields, prompt_key, answer_key, self._chat)

        heldout = read_rows("task.heldout_path", heldout_path, row_of) if heldout_path else None
        self._rows = split_rows(seed, read_rows("task.path", path, row_of), heldout, heldout_fraction)

    def size(self, split: str) -> int:
        if split not in self._rows:
            raise ValueError(f"unknown split {split!r}; the splits are {', '.join(self._rows)}")
        return len(self._rows[split])

    def prompt(self, split: str, row: int) -> Prompt:
        if not 0 <= row < self.size(split):
            raise IndexError(f"row {row} of split {split!r}, which has {self.size(split)}")
        source = self._rows[split][row]
        found = self._prompt(f"{source.place} (row {row} of {split})", self._messages(source.prompt), source.answer)
        filler = self._trace.lengths(source.hash(self._seed)) if self._trace else ()
        return replace(found, filler=filler)

    def place(self, split: str, row: int) -> str:
        """The place of a row, as "path:line"."""
        return self._rows[split][row].place

    def rows_beyond(self, split: str, tokens: int) -> list[int]:
        """The rows whose prompts may be longer than `tokens`, or than `max_prompt_tokens`. It only counts bytes (a
        token has at least one), so that few rows of a long file must be encoded."""
        role = len(self._codec.opening(({"role": "user", "content": ""},)))
        beside = len((self._suffix + (self._system or "")).encode()) + role  # a system message of its own
        room = min(tokens, self._max_prompt_tokens) - beside
        return [number for number, row in enumerate(self._rows[split]) if row.bytes + role * row.messages > room]

    def verification(self, prompt: Prompt, tokens: np.ndarray) -> tuple[str, tuple[str, str], dict[str, object]]:
        """The verifier of a response as "module:name", its arguments (answer, response text) and its knobs."""
        return self._verifier, (prompt.answer, self._text(tokens)), self._knobs

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        """The verifier's score, computed in this process and without a time limit."""
        verifier, arguments, knobs = self.verification(prompt, tokens)
        return float(resolve_name(verifier)(*arguments, **knobs))


def read_rows(key: str, path: str, row_of: Callable[[str, dict[str, object]], Row]) -> list[Row]:
    """The rows of the file that `key` of the config names, without empty lines; `row_of(place, fields)` makes one.
    Raises FileNotFoundError, ValueError."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{key}: no file {path!r}")
    rows = []
    with open(path, encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(row_of(f"{path}:{number}", _fields(f"{path}:{number}", line)))
        except UnicodeDecodeError:
            raise ValueError(f"{_undecodable(path)}: not UTF-8 text; convert the file, e.g. with iconv") from None
    return rows


def _undecodable(path: str) -> str:
    """The place of the first line that is no UTF-8."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"{path}:{number}"
    return path


def _fields(place: str, line: str) -> dict[str, object]:
    try:
        fields = json.loads(line.rstrip("\r\n"))
    except json.JSONDecodeError as error:  # which counts lines from this one
        raise ValueError(f"{place}: not JSON: {error.msg}, at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{place}: want a JSON object, got {type(fields).__name__}")
    return fields


def _row(place: str, fields: dict[str, object], prompt_key: str, answer_key: str, chat: bool) -> Row:
    for key in (prompt_key, answer_key):
        if key not in fields:
            raise ValueError(f"{place}: no {key!r}; the keys are {', '.join(fields)}")
    prompt, answer = fields[prompt_key], fields[answer_key]
    if not isinstance(prompt, str) and not (chat and are_messages(prompt)):
        wanted = "a text or a list of messages {role, content}" if chat else "a text"
        raise ValueError(f"{place}: {prompt_key!r} must be {wanted}")
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float, dict)):
        raise ValueError(f"{place}: {answer_key!r} must be a text, a number or an object")
    return Row(place, prompt, json.dumps(answer) if isinstance(answer, dict) else str(answer))


def are_messages(prompt: object) -> TypeGuard[list[dict[str, str]]]:
    """Is it a list of messages with a role and a text?"""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in prompt)
        and all(isinstance(m.get("content"), str) for m in prompt)
    )


def split_rows(seed: int, rows: list[Row], heldout: list[Row] | None, fraction: float) -> dict[str, list[Row]]:
    """The rows of both splits, shuffled. They share no prompt: prompts, not rows, are held out."""
    if heldout is None:
        if not 0 < fraction < 1:
            raise ValueError(f"task.heldout_fraction must be between 0 and 1, got {fraction}")
        hashes = sorted({row.hash(seed) for row in rows})
        held = set(hashes[: max(1, round(fraction * len(hashes)))])
        heldout = [row for row in rows if row.hash(seed) in held]
    else:
        held = {row.hash(seed) for row in heldout}
        shared = sum(row.hash(seed) in held for row in rows)
        if shared:
            _log.warning("%d training rows are left out: their prompts are held out", shared)
    train = [row for row in rows if row.hash(seed) not in held]
    if not train or not heldout:
        raise ValueError(
            f"task.path: {len(train)} training rows and {len(heldout)} held-out rows (split by prompt); want at "
            "least 1 of each: add rows with other prompts, or name a file of held-out rows in task.heldout_path"
        )
    return {"train": _shuffled(seed, train), "heldout": _shuffled(seed, heldout)}


def _shuffled(seed: int, rows: list[Row]) -> list[Row]:
    order = np.random.Generator(np.random.Philox(key=stream_key(seed))).permutation(len(rows))
    return [rows[i] for i in order]
