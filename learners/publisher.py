"""Weights out: serves the newest versions to whoever asks; each rank of a learner its part of them.

The learner calls `publish` and goes on: `learners.publication` encodes and announces in a thread of its own, and
another one (`areal_like.weights.server`) answers messages.
"""

from __future__ import annotations

from typing import Any

from areal_like.weights.history import History
from areal_like.weights.server import WeightServer
from learners.publication import Alone, Announce, Coding, Others, Publication, Snapshot


class Publisher:
    """Serves on `endpoint`, with `keys` (see `areal_like.keys`) to those on the allow-list. `announce(manifest)` is
    called for every version as soon as all of it can be fetched, by another thread than the caller of `publish`. What a
    rank has of the weights is what its `snapshot` says; `others` have the rest."""

    def __init__(
        self, endpoint: str, coding: Coding, announce: Announce, keys: str | None = None, others: Others | None = None
    ):
        self._publication = Publication(coding, announce, others or Alone())
        self._server = WeightServer(endpoint, keys, self._history)
        self.endpoint = self._publication.endpoint = self._server.endpoint
        self._publication.sent = lambda: self._server.bytes_sent

    def _history(self, part: int) -> History | None:
        return self._publication.history if part == self._publication.part else None

    def publish(self, version: int, snapshot: Snapshot) -> float:
        """Have the weights that `snapshot` returns published as `version`. Returns the seconds for which the caller,
        and with it the learner, stood still."""
        return self._publication.publish(version, snapshot)

    def wait(self) -> dict[str, Any]:
        """Until what was published is announced; returns the manifest of the newest version."""
        self._publication.wait()
        return self._publication.manifest

    @property
    def metrics(self) -> dict[str, float]:
        """Of the newest version that is announced; `publish/bytes`: sent so far."""
        sent = self._server.bytes_sent + self._publication.sent_by_others
        return {"publish/bytes": sent, **self._publication.metrics}

    def close(self) -> None:
        self._server.close()
