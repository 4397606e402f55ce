"""The rows of a task: read from a file with one JSON object per line; some are held out, the others are trained."""

import codecs
import json
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeGuard

import numpy as np
import xxhash

from areal_like.sampling import stream_key
from areal_like.tasks.text import TextTask

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a file: `place` is "path:line", `prompt` a text or a list of chat messages, `template` more arguments
    of its chat template."""

    place: str
    prompt: str | list[dict[str, str]]
    answer: str
    template: Mapping[str, object] = field(default_factory=dict)

    def most_tokens(self, role: int) -> int:
        """A bound on the tokens of its texts, a byte each, with `role` tokens beside each message."""
        if self.template:  # with any effect
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
                more = [row.template] if row.template else []
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
    """The base of tasks of a file with one JSON object per line, which `_row` reads by knobs that a subclass sets
    before it calls this `__init__`. Knobs of the text: see `areal_like.tasks.text`.

    path: the file. heldout_path: file of the held-out rows; a training row whose prompt is among them is left out (and
        logged). Without it, about `heldout_fraction` of the different prompts of `path`, at least one, is held out.

    Raises FileNotFoundError (file, tokenizer folder) and ValueError (a bad line, with file and line; an empty split).
    """

    def __init__(
        self,
        seed: int,
        *,
        path: str,
        heldout_path: str | None = None,
        heldout_fraction: Annotated[float, "(0, 1)"] = 0.05,
        **text: object,
    ):
        super().__init__(**text)  # type: ignore[arg-type]  # its knobs, checked by the registry
        heldout = _read("task.heldout_path", heldout_path, self._row) if heldout_path else None
        self._rows = Rows(seed, _read("task.path", path, self._row), heldout, heldout_fraction)

    @abstractmethod
    def _row(self, place: str, fields: Mapping[str, object]) -> Row:
        """The row of a line's object at `place`. Raises ValueError."""


def _read(key: str, path: str, row_of: Callable[[str, Mapping[str, object]], Row]) -> list[Row]:
    """The rows of the file that `key` of the config names, without empty lines."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{key}: no file {path!r}")
    with open(path, "rb") as file:
        lines = ((f"{path}:{number}", line.removeprefix(codecs.BOM_UTF8)) for number, line in enumerate(file, 1))
        return [row_of(place, _fields(place, line)) for place, line in lines if line.strip()]


def _fields(place: str, line: bytes) -> dict[str, object]:
    try:
        fields = json.loads(line.decode().rstrip("\r\n"))
    except json.JSONDecodeError as error:  # which counts lines from this one
        raise ValueError(f"{place}: not JSON: {error.msg}, at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{place}: want a JSON object, got {type(fields).__name__}")
    return fields


def are_messages(prompt: object) -> TypeGuard[list[dict[str, str]]]:
    """Is it a list of messages with a role and a text?"""
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(m, dict) and all(isinstance(m.get(key), str) for key in ("role", "content")) for m in prompt)


def checked_prompt(
    place: str, key: str, prompt: object, chat: bool, begins: bool = False
) -> str | list[dict[str, str]]:
    """Raises ValueError for a prompt that is neither a text nor, in a chat template, messages. The last one may be the
    assistant's where it `begins` the answer, behind another role's."""
    roles = [m.get("role") for m in prompt if isinstance(m, dict)] if isinstance(prompt, list) else []
    if roles[-1:] == ["assistant"] and (not begins or roles[-2:-1] in ([], ["assistant"])):
        where = "the prompt's last message, behind another role's" if begins else "a turn of its own: take it out"
        raise ValueError(f"{place}: {key!r} ends with a message of the assistant, expected another role; it is {where}")
    if isinstance(prompt, str) or (chat and are_messages(prompt)):
        return prompt
    wanted = "a text or a list of messages {role, content}" if chat else "a text"
    raise ValueError(f"{place}: {key!r} must be {wanted}")
