"""Trackio: a local dashboard with W&B's interface. Its own settings count: TRACKIO_DIR, TRACKIO_SPACE_ID."""

from __future__ import annotations

import contextlib
import io
import shlex
from collections.abc import Mapping, Sequence

import trackio

from areal_like.trackers.interface import Shown, Tracked, markdown, numbers


class Trackio:
    def __init__(self, run: Tracked):
        with _quiet():
            self._run = trackio.init(
                project=run.project,
                name=run.name,
                config=dict(run.settings),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self.where = f"trackio show --project {shlex.quote(run.project)}"

    def add(self, row: Mapping[str, object]) -> None:
        found = numbers(row)
        self._run.log(found, step=int(found.pop("step")))

    def show(self, step: int, samples: Sequence[Shown]) -> None:
        if samples:
            self._run.log({f"samples/{samples[0].source}": trackio.Markdown(markdown(samples))}, step=step)

    def end(self, summary: Mapping[str, object] | None) -> None:
        with _quiet():
            self._run.finish()


def _quiet() -> contextlib.AbstractContextManager[object]:
    """Trackio prints what `where` says."""
    return contextlib.redirect_stdout(io.StringIO())
