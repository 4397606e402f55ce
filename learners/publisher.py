"""Weights out: serves the newest versions to whoever asks.

The learner calls `publish` and goes on: `learners.publication` encodes and announces in a thread of its own, and
another one (`areal_like.weights.server`) answers messages.
"""

from __future__ import annotations

from typing import Any

from areal_like.weights.server import WeightServer
from learners.publication import Announce, Coding, Publication, Snapshot


class Publisher:
    """Serves on `endpoint`, with `keys` (see `areal_like.keys`) to those on the allow-list. `announce(manifest)` is
    called for every version as soon as it can be fetched, by another thread than the caller of `publish`."""

    def __init__(self, endpoint: str, coding: Coding, announce: Announce, keys: str | None = None):
        self._publication = Publication(coding, announce)
        self._server = WeightServer(endpoint, keys, lambda: self._publication.history)
        self.endpoint = self._publication.endpoint = self._server.endpoint

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
        return {"publish/bytes": self._server.bytes_sent, **self._publication.metrics}

    def close(self) -> None:
        self._server.close()
