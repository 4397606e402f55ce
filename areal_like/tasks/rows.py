"""The rows of a task: read from a file or a data set; some are held out, the others are trained."""

import json
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeGuard

import numpy as np
import xxhash

from areal_like.sampling import stream_key
from areal_like.tasks.chat import ROLE
from areal_like.tasks.records import records
from areal_like.tasks.text import TextTask

_log = logging.getLogger(__name__)
JSON_COLUMNS: dict[str, type] = {"tools": list, "template": dict}
"""Columns that may be JSON text: what a row's chat template gets beside the messages."""


@dataclass(frozen=True, slots=True)
class Row:
    """One record: `place` is "path:line", `prompt` a text or a list of chat messages, `template` more arguments of its
    chat template, `tools` those that it shows, `columns` what the reward takes beside the answer."""

    place: str
    prompt: str | list[dict[str, str]]
    answer: str
    template: Mapping[str, object] = field(default_factory=dict)
    tools: Sequence[object] = ()
    columns: Mapping[str, object] = field(default_factory=dict)

    def most_tokens(self, role: int) -> int:
        """A bound on the tokens of its texts, a byte each, with `role` tokens beside each message."""
        if self.template or self.tools:  # with any effect
            return sys.maxsize
        texts = [self.prompt] if isinstance(self.prompt, str) else [text for m in self.prompt for text in m.values()]
        messages = 1 if isinstance(self.prompt, str) else len(self.prompt)
        return sum(len(str(text).encode(errors="replace")) for text in texts) + role * messages

    def hash(self, seed: int) -> int:
        """A 64-bit hash of the prompt's content: equal for equal prompts. It decides which prompts are held out."""
        return xxhash.xxh3_64_intdigest(json.dumps(self.prompt, sort_keys=True).encode(), seed=stream_key(seed))


class Rows:
    """The rows of both splits, shuffled by the seed. The splits share no prompt: prompts, not rows, are held out.

    `heldout`: the held-out rows; training rows with a prompt of theirs are left out. Without it, about `fraction` of
    the different prompts, at least one, is held out: a prompt's content decides, so that rows which are added later
    change no other row's split. Raises ValueError if a split is empty.
    """

    def __init__(self, seed: int, rows: list[Row], heldout: list[Row] | None, fraction: float):
        self._heldout = "heldout" if heldout is None else "heldout_path"
        if heldout is None:
            hashes = {row.hash(seed) for row in rows}
            held = {each for each in hashes if each < fraction * 2**64}
            held = held if 0 < len(held) < len(hashes) else set(sorted(hashes)[:1])
            heldout = [row for row in rows if row.hash(seed) in held]
        else:
            held = {row.hash(seed) for row in heldout}
            shared = sum(row.hash(seed) in held for row in rows)
            if shared:
                _log.warning("%d training rows are left out: their prompts are held out", shared)
        train = [row for row in rows if row.hash(seed) not in held]
        if not train or not heldout:
            counts = f"{len(train)} training rows and {len(heldout)} held-out rows (split by prompt)"
            hint = "add rows with other prompts, or name a file of held-out rows in task.heldout_path"
            raise ValueError(f"task.path: got {counts}, expected at least 1 of each: {hint}")
        self.splits: dict[str, list[Row]] = {}
        for split, found in (("train", train), ("heldout", heldout)):
            order = np.random.Generator(np.random.Philox(key=stream_key(seed))).permutation(len(found))
            self.splits[split] = [found[i] for i in order]

    def row(self, split: str, row: int) -> tuple[Row, str]:
        """A row, and how messages call it. Raises IndexError."""
        rows = self.splits[split]
        if not 0 <= row < len(rows):
            raise IndexError(f"row {row} of split {split!r}, which has {len(rows)}")
        return rows[row], f"{rows[row].place} (row {row} of {split})"

    def digests(self) -> dict[str, str]:
        """Split, or "heldout_path" for a file's → the number and the digest of its rows in their order."""
        found = {}
        for split, rows in zip(("train", self._heldout), self.splits.values(), strict=True):
            digest = xxhash.xxh3_64()
            for row in rows:
                more = [each for each in (row.template, row.tools, row.columns) if each]
                digest.update(json.dumps([row.hash(0), row.answer, *more]).encode())
            found[split] = f"{len(rows)} rows ({digest.hexdigest()})"
        return found


class TaskOfRows:
    """A task with `_rows`."""

    _rows: Rows

    def size(self, split: str) -> int:
        return len(self._rows.splits[split])

    def digests(self) -> dict[str, str]:
        return self._rows.digests()

    def place(self, split: str, row: int) -> str:
        """The origin of a row, such as "path:line"."""
        return self._rows.splits[split][row].place


class FileTask(TaskOfRows, TextTask, ABC):
    """The base of tasks of records, which `_row` reads by knobs that a subclass sets before it calls this `__init__`.

    path: a file (.jsonl, .csv, .parquet), a folder (of `save_to_disk`, or of data files), or a data set's name on the
        Hugging Face Hub, as ORG/NAME or ORG/NAME@REVISION. Of the last two, split (null: "train") of the
        configuration `subset`.
    heldout_path, heldout_split: the held-out rows, one of the two: another file, another split; a training row whose
        prompt is among them is left out (and logged). Without them, about `heldout_fraction` of the different
        prompts of `path`, at least one, is held out.

    Raises FileNotFoundError (file, tokenizer folder) and ValueError (a bad row, with its place; an empty split).
    """

    def __init__(
        self,
        seed: int,
        *,
        path: str,
        subset: str | None = None,
        split: str | None = None,
        heldout_path: str | None = None,
        heldout_split: str | None = None,
        heldout_fraction: Annotated[float, "(0, 1)"] = 0.05,
        **text: object,
    ):
        super().__init__(**text)  # type: ignore[arg-type]  # its knobs, checked by the registry
        rows, heldout = [self._row(*each) for each in records("task.path", path, subset, split)], None
        if heldout_path or heldout_split:
            key = "task.heldout_path" if heldout_path else "task.heldout_split"
            source = records(key, heldout_path or path, subset if heldout_split else None, heldout_split)
            heldout = [self._row(*each) for each in source]
        self._rows = Rows(seed, rows, heldout, heldout_fraction)

    @abstractmethod
    def _row(self, place: str, fields: Mapping[str, object]) -> Row:
        """The row of the columns at `place`. Raises ValueError."""


def column_names(given: Mapping[str, str] | None, *known: str) -> dict[str, str]:
    """Each of the `known` columns → its name in the data, by `task.columns`. Raises ValueError."""
    if other := sorted({*(given or ())} - {*known}):
        raise ValueError(f"task.columns: got {other[0]!r}, expected {', '.join(known)}, each with its name in the data")
    return {column: (given or {}).get(column, column) for column in known}


def are_messages(prompt: object) -> TypeGuard[list[dict[str, str]]]:
    """Is it a list of messages with a role, which is a word, and a text?"""
    if not isinstance(prompt, list) or not prompt or not all(isinstance(m, dict) for m in prompt):
        return False
    told = [(m.get("role"), m.get("content")) for m in prompt]
    return all(isinstance(role, str) and ROLE.fullmatch(role) and isinstance(text, str) for role, text in told)


def checked_prompt(place: str, key: str, prompt: object, chat: bool) -> str | list[dict[str, str]]:
    """Raises ValueError for a prompt that is neither a text nor, in a chat template, messages. The last one may be the
    assistant's, behind another role's: it begins the answer."""
    roles = [m.get("role") for m in prompt if isinstance(m, dict)] if isinstance(prompt, list) else []
    if roles[-1:] == ["assistant"] and roles[-2:-1] in ([], ["assistant"]):
        raise ValueError(f"{place}: {key!r} ends with a message of the assistant, expected another role's before it")
    if isinstance(prompt, str) or (chat and are_messages(prompt)):
        return prompt
    wanted = "a text or a list of messages {role (a word), content}" if chat else "a text"
    raise ValueError(f"{place}: {key!r} must be {wanted}")


def as_json(place: str, key: str, fields: Mapping[str, object], kind: type) -> Any:
    """The list or object in a column, itself or as JSON text; an empty one where there is none. Raises ValueError."""
    given = fields.get(key) or kind()
    with suppress(ValueError):
        given = json.loads(given) if isinstance(given, str) else given
    if not isinstance(given, kind):
        form = "a list of JSON schemas of functions" if kind is list else "an object"
        raise ValueError(f"{place}: {key!r}: got {given!r}, expected {form}; task.columns can name another column")
    return given
