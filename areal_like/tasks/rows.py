"""The rows of a task: read from a file with one JSON object per line; some are held out, the others are trained."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
import xxhash

from areal_like.sampling import stream_key

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


class Rows:
    """The rows of both splits, shuffled by the seed. The splits share no prompt: prompts, not rows, are held out.

    `heldout`: the held-out rows; training rows with a prompt of theirs are left out. Without it, `fraction` of the
    different prompts, at least one, is held out. Raises ValueError if a split is empty.
    """

    def __init__(self, seed: int, rows: list[Row], heldout: list[Row] | None, fraction: float):
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
        self._splits = {"train": _shuffled(seed, train), "heldout": _shuffled(seed, heldout)}

    def of(self, split: str) -> list[Row]:
        """Raises ValueError."""
        if split not in self._splits:
            raise ValueError(f"unknown split {split!r}; the splits are {', '.join(self._splits)}")
        return self._splits[split]

    def row(self, split: str, row: int) -> tuple[Row, str]:
        """A row, and how messages call it. Raises IndexError."""
        rows = self.of(split)
        if not 0 <= row < len(rows):
            raise IndexError(f"row {row} of split {split!r}, which has {len(rows)}")
        return rows[row], f"{rows[row].place} (row {row} of {split})"


def _shuffled(seed: int, rows: list[Row]) -> list[Row]:
    order = np.random.Generator(np.random.Philox(key=stream_key(seed))).permutation(len(rows))
    return [rows[i] for i in order]


def rows_of_files(
    seed: int, path: str, heldout_path: str | None, fraction: float, row_of: Callable[[str, dict[str, object]], Row]
) -> Rows:
    """The rows of `task.path` and `task.heldout_path`; `row_of(place, fields)` makes one. Raises FileNotFoundError,
    ValueError."""
    heldout = _read("task.heldout_path", heldout_path, row_of) if heldout_path else None
    return Rows(seed, _read("task.path", path, row_of), heldout, fraction)


def _read(key: str, path: str, row_of: Callable[[str, dict[str, object]], Row]) -> list[Row]:
    """The rows of the file that `key` of the config names, without empty lines."""
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


def are_messages(prompt: object) -> TypeGuard[list[dict[str, str]]]:
    """Is it a list of messages with a role and a text?"""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in prompt)
        and all(isinstance(m.get("content"), str) for m in prompt)
    )
