"""The newest sample of a run, as a line for the live display.

A thread loads what it needs of the task (perhaps a tokenizer), so that the display does not wait. Until then, or if
that fails, there is no line.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from areal_like.run.samples import FOLDER, TRAINED, Kept, decoded

if TYPE_CHECKING:
    from ..samples import Texts

TAIL_BYTES = 1 << 18
"""Bytes read at the end of the file: a longer sample is not shown."""


class LastSample:
    """`text` is called many times a second and does little."""

    def __init__(self, run: Path):
        self._run, self._path, self._size = run, run / FOLDER / f"{TRAINED}.jsonl", 0
        self._record: Kept | None = None
        self._texts: Texts | None = None
        self._thread: threading.Thread | None = None

    def text(self) -> str:
        """`prompt → answer (reward 0.5)`; "" if there is no sample yet."""
        self._look()
        if self._record and not self._thread:
            self._thread = threading.Thread(target=self._load, name="texts of samples", daemon=True)
            self._thread.start()
        if not (self._record and self._texts):
            return ""
        from ..console.output import shortened, visible

        record, texts = self._record, self._texts
        try:
            prompt, answer = texts.of(record.tokens[: record.prompt_length]), texts.of(record.response)
        except Exception:  # the codec is the user's code: an error in it must not end the run
            return ""
        said = f"{shortened(prompt, 60)} → {shortened(answer, 120)}"
        return f"{visible(said)} (reward {record.reward or 0.0:g}, step {record.step})"

    def _look(self) -> None:
        try:
            size = self._path.stat().st_size
            if size == self._size:
                return
            with self._path.open("rb") as file:
                file.seek(max(0, size - TAIL_BYTES))
                lines = file.read().split(b"\n")
        except OSError:
            return
        self._size = size
        self._record = next((found for line in reversed(lines) if line and (found := decoded(line))), self._record)

    def _load(self) -> None:
        from ..samples import Texts

        try:
            self._texts = Texts(self._run)
        except Exception:  # the task is the user's code: the run itself reports its errors
            self._texts = None
