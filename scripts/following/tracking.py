"""Feeds a run's trackers (`run.trackers`) from its metrics and samples, in one thread.

A tracker that fails is reported once and then no longer used. A slow one gets `END_SECONDS` at the end. Nothing here
can stop or slow a run.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areal_like.config import run_config as configs
from areal_like.config.registry import resolve
from areal_like.config.run_config import Config
from areal_like.run.samples import HELDOUT, TRAINED, Kept, follower
from areal_like.trackers.interface import Shown, Tracked, Tracker

from ..samples import Texts

END_SECONDS = 30.0
EXAMPLES, TIMES = 4, 100
"""Held-out answers shown per evaluation, of the first rows; times in a run at which the best and the worst trained
sample of the newest group are shown."""


class Tracking:
    """`row` hands over a row of metrics; `notes` returns messages for the user."""

    def __init__(self, config: Config, folder: Path):
        self._run = Tracked(folder, config.run.project, folder.name, configs.leaves(config))
        self._names = list(config.run.trackers)
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._trackers: dict[str, Tracker] = {}
        self._samples: _Samples | None = _Samples(folder, max(1, config.run.steps // TIMES))
        self._thread = threading.Thread(target=self._work, name="trackers", daemon=True)
        self._thread.start()

    def row(self, row: Mapping[str, Any]) -> None:
        self._waiting.put(lambda: self._take(row))

    def notes(self) -> list[str]:
        found = []
        while not self._notes.empty():
            found.append(self._notes.get())
        return found

    def end(self, summary: Mapping[str, object] | None) -> list[str]:
        """End the trackers; returns the last messages for the user, and where to look at the run."""
        self._waiting.put(lambda: self._each("end", summary))
        self._waiting.put(None)
        self._thread.join(END_SECONDS)
        left = self.notes()
        if self._thread.is_alive():
            names = ", ".join(self._trackers or self._names)
            left.append(f"trackers ({names}) have not taken everything within {END_SECONDS:.0f} s; the rest is lost")
        return left + [f"{name}: {tracker.where}" for name, tracker in self._trackers.items()]

    # ---- in the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        for name in self._names:
            try:
                self._trackers[name] = resolve("tracker", name)(self._run)
            except Exception as error:  # of third-party code, here and below
                self._failed(name, error)
        while (job := self._waiting.get()) is not None:
            job()

    def _take(self, row: Mapping[str, Any]) -> None:
        self._each("add", row)
        if not self._trackers or not self._samples:
            return
        try:
            shown = self._samples.after(row["step"])
        except Exception as error:
            self._samples = None
            self._notes.put(f"trackers show no samples: {error or repr(error)}")
            return
        for samples in shown:
            self._each("show", row["step"], samples)

    def _each(self, method: str, *args: object) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                getattr(tracker, method)(*args)
            except Exception as error:
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        self._trackers.pop(name, None)
        self._notes.put(f"tracker {name}: the rest of the run is not shown there: {error or repr(error)}")


class _Samples:
    """Samples worth showing, as they come."""

    def __init__(self, folder: Path, every: int):
        self._every = every
        self._heldout, self._trained = follower(folder, HELDOUT), follower(folder, TRAINED)
        self._folder = folder
        self._texts: Texts | None = None

    def after(self, step: int) -> list[list[Shown]]:
        """The samples written since the last call: one list per source."""
        heldout, trained = self._heldout.new_rows(), self._trained.new_rows() if step % self._every == 0 else []
        newest = max((record.version for record in heldout), default=0)
        first = sorted((each for each in heldout if each.version == newest), key=lambda each: (each.group, each.index))
        group = [each for each in trained if each.group == trained[-1].group]
        group.sort(key=lambda each: -(each.reward or 0.0))
        ends = [group[0], group[-1]] if len(group) > 1 else group
        sources = {"held-out": first[:EXAMPLES], "trained": ends}
        return [self._shown(source, records) for source, records in sources.items() if records]

    def _shown(self, source: str, records: list[Kept]) -> list[Shown]:
        texts = self._texts = self._texts or Texts(self._folder)
        of = lambda each: (texts.prompt(each), texts.of(each.response), texts.wanted(each))  # noqa: E731
        return [Shown(source, *of(each), each.reward or 0.0, each.staleness) for each in records]
