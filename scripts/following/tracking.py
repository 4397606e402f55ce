"""Feeds a run's trackers (`run.trackers`) from its metrics, in one thread.

A failing tracker is reported once and left. A slow one gets `END_SECONDS` at the end.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areal_like.config import run_config as configs
from areal_like.config.registry import resolve
from areal_like.config.run_config import Config
from areal_like.interfaces import Tracked, Tracker

END_SECONDS = 30.0


class Tracking:
    """`row` hands over a row of metrics; `notes` returns messages for the user."""

    def __init__(self, config: Config, folder: Path):
        self._run = Tracked(folder, config.run.project, folder.name, configs.leaves(config))
        self._names = list(config.run.trackers)
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._trackers: dict[str, Tracker] = {}
        self._thread = threading.Thread(target=self._work, name="trackers", daemon=True)
        self._thread.start()

    def row(self, row: Mapping[str, Any]) -> None:
        self._waiting.put(lambda: self._each("add", row))

    def notes(self) -> list[str]:
        return [self._notes.get() for _ in range(self._notes.qsize())]

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

    def _each(self, method: str, *args: object) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                getattr(tracker, method)(*args)
            except Exception as error:
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        self._trackers.pop(name, None)
        self._notes.put(f"tracker {name}: the rest of the run is not shown there: {error or repr(error)}")
