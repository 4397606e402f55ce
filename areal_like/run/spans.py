"""Working times: every process records the spans of time in which it worked, for `areal-like timeline`.

A file per role, `spans/ROLE.jsonl`, has an object per span: `name`, and `begin` and `end` in seconds since 1970;
adjacent spans of a name are joined. A full disk ends the recording alone."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from areal_like.run.metrics import Follower

log = logging.getLogger(__name__)
FOLDER = "spans"
START = "start"
"""Name of the learner's span, without length, at each start of a run."""
GAP_SECONDS = 0.0005
"""Spans that are closer than this are adjacent."""


class Span(NamedTuple):
    name: str
    begin: float
    end: float


class Spans:
    """Spans of `role`, in a run's folder (None: not written). `since_1970`: of the clock's 0 (None: monotonic)."""

    def __init__(self, run: Path | None = None, role: str = "", since_1970: float | None = None):
        self._file = None
        self._since_1970 = time.time() - time.monotonic() if since_1970 is None else since_1970
        if run:
            try:
                (run / FOLDER).mkdir(exist_ok=True)
                self._file = (run / FOLDER / f"{role}.jsonl").open("a", buffering=1, encoding="utf-8")
            except OSError as error:
                log.warning("this process has no timeline: %s", error)

    def add(self, name: str, begin: float, end: float) -> None:
        """A span between two times of `time.monotonic`."""
        if end > begin:
            self._write(name, begin, end)

    def start(self, now: float) -> None:
        """Record that the run starts or resumes: the time since its earlier spans is nobody's."""
        self._write(START, now, now)

    def _write(self, name: str, begin: float, end: float) -> None:
        if self._file:
            begin, end = begin + self._since_1970, end + self._since_1970
            try:
                self._file.write(f'{{"name": "{name}", "begin": {begin:.6f}, "end": {end:.6f}}}\n')
            except OSError as error:
                log.warning("the timeline of this process ends here: %s", error)
                self._file = None

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.add(name, begin, time.monotonic())


class Busy:
    """Spans in which at least one of several things is under way. `clock`: that of `spans`."""

    def __init__(self, spans: Spans, name: str, clock: Callable[[], float] = lambda: time.monotonic()):
        self._spans, self._name, self._clock = spans, name, clock
        self._count, self._since = 0, 0.0

    def enter(self) -> None:
        if not self._count:
            self._since = self._clock()
        self._count += 1

    def leave(self) -> None:
        self._count -= 1
        if not self._count:
            self._spans.add(self._name, self._since, self._clock())

    def so_far(self) -> None:
        """Record the part of a running span that has passed."""
        if self._count:
            now = self._clock()
            self._spans.add(self._name, self._since, now)
            self._since = now


def read(run: Path) -> dict[str, list[Span]]:
    """Role → its spans in order of their begin, adjacent ones joined; also while they are written."""
    return {path.stem: _joined(path) for path in sorted((run / FOLDER).glob("*.jsonl"))}


def _joined(path: Path) -> list[Span]:
    found: list[Span] = []
    newest: dict[str, int] = {}
    for span in sorted(Follower(path, _span).each_new_row(), key=lambda span: span.begin):
        place = newest.get(span.name)
        if place is not None and span.begin - found[place].end < GAP_SECONDS:
            found[place] = found[place]._replace(end=max(span.end, found[place].end))
        else:
            newest[span.name] = len(found)
            found.append(span)
    return found


def _span(line: bytes) -> Span | None:
    try:
        row = json.loads(line)
        return Span(str(row["name"]), float(row["begin"]), float(row["end"]))
    except (ValueError, KeyError, TypeError):
        return None
